"""What goes wrong with preferences is said with its figures and what to try; of a good run there is nothing to say."""

import pytest
from report_helpers import OF_PAIRS, opened_pairs, pair_evaluation, pair_row, step_row

from kit.tools.report.preference_remarks import preference_remarks
from kit.tools.report.remarks import remarks

MANY = range(1, 31)
HEALTHY = [*map(pair_row, MANY), pair_evaluation(30, loss=0.5)]


def said(tmp_path, rows, num_evaluated=400, **settings):
    return preference_remarks(opened_pairs(tmp_path, rows, num_evaluated, settings))


@pytest.mark.parametrize("objective", ["dpo", "orpo", "simpo", "cpo", "kto"])
def test_of_a_good_run_there_is_nothing_to_say(tmp_path, objective):
    rows = [pair_evaluation(0, loss=0.7, rewards__accuracies=0.5), *HEALTHY]
    assert remarks(opened_pairs(tmp_path, rows, settings={"objective": objective}, finished_steps=30)) == []


def test_of_answers_nothing_is_said(tmp_path):
    rows = [*(pair_row(step, rewards__accuracies=0.5) for step in MANY)]
    assert said(tmp_path, rows) and not said(tmp_path, rows, objective="sft")


@pytest.mark.parametrize(
    ("share", "num", "text"),
    [
        (
            0.52,
            400,
            "The accuracy is at chance: 52.0% of 400 evaluation pairs after step 30, where guessing reaches up",
        ),
        (0.3, 400, "The accuracy is below chance: 30.0% of 400 evaluation pairs"),
        (0.56, 400, ""),
        (0.6, 40, "The accuracy is at chance: 60.0% of 40 evaluation pairs"),  # of few pairs it may be so by chance
    ],
)
def test_an_accuracy_that_guessing_reaches_too_is_named(tmp_path, share, num, text):
    rows = [*map(pair_row, MANY), pair_evaluation(30, rewards__accuracies=share)]
    found = said(tmp_path, rows, num)
    assert [each[: len(text)] for each in found] == [text] if text else found == []


@pytest.mark.parametrize(
    ("share", "objective", "way"),
    [(0.5, "dpo", "more steps or a higher"), (0.3, "dpo", "a lower"), (0.3, "simpo", "more steps or a higher")],
)
def test_a_rate_that_is_too_high_makes_an_accuracy_below_chance(tmp_path, share, objective, way):
    rows = [*map(pair_row, MANY), pair_evaluation(30, rewards__accuracies=share)]
    (found,) = said(tmp_path, rows, objective=objective)
    assert f"Try {way} learning_rate, and see in `kit inspect`" in found


def test_without_an_evaluation_the_accuracy_is_that_of_the_last_steps(tmp_path):
    found = said(tmp_path, [pair_row(step, rewards__accuracies=0.5) for step in MANY], global_batch_size=8)
    assert found[0].startswith("The accuracy is at chance: 50.0% of 40 pairs of the last 5 logged steps")


def test_of_a_run_that_has_just_begun_nothing_is_said(tmp_path):
    rows = [pair_row(step, loss=0.6931, rewards__accuracies=0.5) for step in range(1, 20)]
    assert said(tmp_path, [*rows, pair_evaluation(10, rewards__accuracies=0.5)]) == []


def test_pairs_learned_by_heart_are_named_where_other_pairs_were_better_before(tmp_path):
    trained = [pair_row(step, rewards__accuracies=0.97) for step in MANY]
    rows = [*trained, pair_evaluation(10, rewards__accuracies=0.8), pair_evaluation(30, rewards__accuracies=0.7)]
    (found,) = said(tmp_path, rows)
    assert found.startswith(
        "The accuracy on the evaluation pairs was highest after step 10 (80.0%) and is 70.0% after "
    )
    assert "97% of the training pairs are right" in found and "--metric_for_best_model eval_rewards/accuracies" in found
    assert said(tmp_path, rows, num_evaluated=80) == []  # 10% of 80 pairs is within what chance does
    assert said(tmp_path, [*map(pair_row, MANY), *rows[-2:]]) == []  # the training pairs are not yet all right


@pytest.mark.parametrize(
    ("loss", "settings", "text"),
    [
        (0.6928, {}, "The loss stayed at ln 2 = 0.6931"),
        (0.6928, {"dpo_loss": "sigmoid_norm"}, "learning_rate (0.0002) or a larger beta, since"),
        (0.6928, {"dpo_loss": "hinge"}, "The training loss did not fall"),  # which begins at 1
        (0.6928, {"objective": "cpo"}, "The training loss did not fall"),
        (0.499, {"objective": "kto"}, "The loss stayed at 0.5"),
        (0.499, {"objective": "kto", "desirable_weight": 2.0}, "The training loss did not fall"),
    ],
)
def test_a_loss_that_stays_where_model_and_reference_are_equal_is_named_once(tmp_path, loss, settings, text):
    """And not the accuracy at chance that follows from it."""
    rows = [pair_row(step, loss=loss, rewards__accuracies=0.5) for step in MANY]
    settings = {"learning_rate": 2e-4, **settings}
    found = remarks(opened_pairs(tmp_path, rows, settings=settings))
    assert sum("The loss stayed" in each or "did not fall" in each for each in found) == 1
    assert any(text in each for each in found), found
    assert any("at chance" in each for each in found) == ("stayed" not in found[0])


def test_a_loss_that_left_its_start_is_not_named(tmp_path):
    rows = [pair_row(step, loss=0.6931 - step / 1000) for step in MANY]
    assert said(tmp_path, rows) == []


def test_chosen_answers_that_became_much_less_likely_are_named_with_the_rejected(tmp_path):
    """Of 20 tokens each: a reward of -0.5 with beta 0.1 is 5 nats, 0.25 a token."""
    fallen = {"rewards__chosen": -0.5, "rewards__rejected": -2.0, "rewards__margins": 1.5}
    (found,) = said(tmp_path, [*map(pair_row, MANY), pair_evaluation(30, **fallen)])
    assert found.startswith(
        "The chosen answers became less likely, by 0.25 nats a token: log-probability -35.0 → -40.0 an answer, of the "
        "rejected ones -40.0 → -60.0."
    )
    assert "a lower learning_rate or a larger beta holds them; --objective orpo or cpo learns" in found
    assert said(tmp_path, [pair_row(step, **fallen) for step in MANY])[0] == found  # without an evaluation
    assert said(tmp_path, [*map(pair_row, MANY), pair_evaluation(30, **fallen | {"rewards__chosen": -0.3})]) == []


def test_without_a_reference_the_likelihood_is_compared_with_the_first_evaluation(tmp_path):
    first, last = (pair_evaluation(step, logps__chosen=logps) for step, logps in ((10, -30.0), (30, -40.0)))
    (found,) = said(tmp_path, [*map(pair_row, MANY), first, last], objective="simpo", beta=2.0)
    assert "by 0.5 nats a token: log-probability -30.0 → -40.0 an answer" in found
    assert said(tmp_path, [*map(pair_row, MANY), last], objective="simpo", beta=2.0) == []  # nothing to compare with
    (found,) = said(tmp_path, [*map(pair_row, MANY), first, last], objective="cpo")
    assert "a larger cpo_alpha" in found and "--objective" not in found
    falling = [pair_row(step, logps__chosen=-30.0 - step) for step in MANY]
    assert "log-probability -33.0 → -58.0 an answer" in said(tmp_path, falling, objective="simpo")[0]


@pytest.mark.parametrize(
    ("chosen", "settings", "text"),
    [
        (29.0, {}, ""),
        (30.0, {}, "The chosen answers are much longer than the rejected ones: 30 tokens on average, and 21."),
        (14.0, {}, "The chosen answers are much shorter than the rejected ones: 14 tokens on average, and 21."),
        (30.0, {"objective": "kto"}, "The good answers are much longer than the bad ones"),
    ],
)
def test_answers_that_their_length_tells_apart_are_named(tmp_path, chosen, settings, text):
    found = said(tmp_path, [pair_row(step, lengths__chosen=chosen) for step in MANY], **settings)
    assert [each[: len(text)] for each in found] == [text] if text else found == []


@pytest.mark.parametrize(
    ("settings", "is_named"),
    [
        ({}, True),
        ({"objective": "cpo"}, True),
        ({"objective": "kto"}, False),
        ({"objective": "simpo"}, False),
        ({"dpo_loss": "sigmoid_norm"}, False),
    ],
)
def test_an_objective_that_divides_by_the_length_is_named_where_it_helps(tmp_path, settings, is_named):
    (found,) = said(tmp_path, [pair_row(step, lengths__chosen=40.0) for step in MANY], **settings)
    assert ("--objective simpo or --dpo_loss sigmoid_norm divides" in found) == is_named


@pytest.mark.parametrize(("length", "expected", "is_named"), [(160, 90, True), (140, 90, False), (160, 120, False)])
def test_generated_answers_that_grow_beyond_the_expected_ones_are_named(tmp_path, length, expected, is_named):
    def answered(step, text):
        answer = {"prompt": "?", "reference": "r" * expected, "text": text, "exact": False}
        return pair_evaluation(step) | {"answers": [answer, answer]}

    found = said(tmp_path, [answered(0, "x" * 100), *map(pair_row, MANY), answered(30, "x" * length)])
    text = (
        "The generated answers became longer: 100 characters on average before training, 160 after step 30, where 90 "
    )
    assert [each[: len(text)] for each in found] == ([text] if is_named else [])
    assert not any("of the data are longer" in each for each in found)  # they are not


def test_what_may_have_made_the_answers_longer_is_named_unless_they_do_not_end(tmp_path):
    def answered(step, text, **changes):
        answer = {"prompt": "?", "reference": "r", "text": text, "exact": False}
        return pair_evaluation(step) | {"answers": [answer]} | changes

    rows = [answered(0, "x"), *(pair_row(step, lengths__chosen=22.0) for step in MANY)]
    (found,) = said(tmp_path, [*rows, answered(30, "xx")])
    assert found.endswith("learned to write more, because the chosen ones of the data are longer.")
    assert said(tmp_path, [*rows, answered(30, "xx", num_unended_answers=1)]) == []


def test_metrics_that_lack_a_key_are_no_failure(tmp_path):
    """As of kto, where all answers may be good."""
    for objective in ["dpo", "simpo", "kto", "orpo"]:
        for key in OF_PAIRS:
            case = objective, key
            rows = [{k: v for k, v in row.items() if k not in (key, f"eval_{key}")} for row in HEALTHY]
            assert said(tmp_path, rows, objective=objective) == [], case
            assert said(tmp_path, [step_row(1)], objective=objective) == [], case

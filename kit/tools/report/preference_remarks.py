"""What goes wrong with preferences, as far as the metrics show it, in sentences; see ``kit.tools.report.remarks``."""

import math
from collections.abc import Iterator

from kit.tools.report.measures import ACCURACY
from kit.tools.report.metrics import FEWEST_ROWS, Row, finite_number, first_and_last
from kit.tools.report.preference_curves import names_of_answers
from kit.tools.report.runs import ReportedRun
from kit.tools.report.words import after

# Below these thresholds there is no remark.
LEARNED = 0.01  # of the loss at the start. A margin of 0.014 takes 1% from the loss of dpo.
LEARNED_PAIRS = 0.95  # share of the training pairs: there is hardly one left to learn from
# Nats a token: each token of a chosen answer has lost a fifth of its probability. Some loss is usual, above all after
# training on these answers.
FALLEN = 0.2
# Ratio of mean lengths. If the lengths of two answers to a prompt usually differ by a factor of two, the longer one is
# then the chosen one in 7 of 10 pairs, and its length says nearly all.
MUCH_LONGER = 1.4
GROWN = 1.5  # ratio of mean lengths of the generated answers, of which the metrics keep three
_PER_TOKEN = ("ipo", "sigmoid_norm")  # dpo_loss


def preference_remarks(run: ReportedRun) -> list[str]:
    """Return the remarks about a run on preferences, the most serious first; empty for any other run."""
    if not run.is_of_preferences:
        return []
    still = unmoved_loss(run)
    accuracy = [] if still else _chance(run)  # if nothing is learned, the accuracy is at chance
    return [*filter(None, [still]), *accuracy, *_learned_by_heart(run), *_likelihood(run), *_lengths(run)]


def unmoved_loss(run: ReportedRun) -> str:
    """Return the remark about a loss that stays where it is as long as the model equals its reference; else empty."""
    recipe, ends = run.recipe, first_and_last(run.training.values("loss"))
    start, name = 0.0, ""
    if recipe.objective == "dpo" and recipe.dpo_loss in ("sigmoid", "robust", "sigmoid_norm"):
        start, name = math.log(2), "ln 2 = 0.6931"
    elif recipe.objective == "kto" and recipe.desirable_weight == recipe.undesirable_weight == 1:
        start, name = 0.5, "0.5"
    if not ends or any(abs(value - start) > LEARNED * start for value in ends[:2]):
        return ""
    first, last, num = ends
    larger = (
        " or a larger beta, since a log-probability per token is small" if recipe.dpo_loss == "sigmoid_norm" else ""
    )
    return (
        f"The loss stayed at {name}, where it is if the model equals its reference: {first:.4f} in the first {num} "
        f"logged steps, {last:.4f} in the last {num}. Try ten times the learning_rate "
        f"({recipe.peak_learning_rate:g}){larger}. If that changes nothing, no weight is trained on which the answers "
        "depend, or the reference is trained too."
    )


def _chance(run: ReportedRun) -> Iterator[str]:
    """The accuracy after some steps, if guessing would reach it too."""
    last = _last_evaluation(run)
    ends = first_and_last(run.training.values("rewards/accuracies"))
    if run.steps_done < FEWEST_ROWS:
        return
    if ACCURACY.key in last and _num_evaluated(run):
        share, num, where = last[ACCURACY.key], _num_evaluated(run), f"evaluation pairs {after(last['step'])}"
    elif ends:
        share, num = ends[1], ends[2] * run.recipe.global_batch_size
        where = f"pairs of the last {ends[2]} logged steps"
    else:
        return
    if share <= 0.5 + _noise(num):
        is_below = share < 0.5 - _noise(num)
        # Against a reference, training begins at chance: what is below it went the wrong way.
        way = "a lower" if is_below and run.recipe.declared.has_reference else "more steps or a higher"
        yield (
            f"The accuracy is {'below' if is_below else 'at'} chance: {share:.1%} of {num:,} {where}, where guessing "
            f"reaches up to {0.5 + _noise(num):.0%}. Try {way} learning_rate, and see in `kit inspect` whether chosen "
            "and rejected are the right way round, and whether they differ."
        )


def _learned_by_heart(run: ReportedRun) -> Iterator[str]:
    """Training pairs that are nearly all right, while the evaluation pairs were better before."""
    ends, num = first_and_last(run.training.values("rewards/accuracies")), _num_evaluated(run)
    best, last = ACCURACY.best(run.evaluations), _last_evaluation(run)
    if not (ends and best and num and ACCURACY.key in last) or ends[1] < LEARNED_PAIRS:
        return
    if best[ACCURACY.key] - last[ACCURACY.key] > _noise(num):
        yield (
            f"The accuracy on the evaluation pairs was highest {after(best['step'])} ({best[ACCURACY.key]:.1%}) and is "
            f"{last[ACCURACY.key]:.1%} {after(last['step'])}, while {ends[1]:.0%} of the training pairs are right: the "
            "model learns these by heart. Train fewer steps, with a lower learning_rate or a larger beta; --keep_best "
            f"true with --metric_for_best_model {ACCURACY.key} keeps the best checkpoint."
        )


def _likelihood(run: ReportedRun) -> Iterator[str]:
    """Chosen answers that became much less likely, as they can since only the difference to the rejected counts."""
    chosen, rejected = _change(run, "chosen"), _change(run, "rejected")
    if not chosen or not rejected:
        return
    (before, now, tokens), (other_before, other_now, _) = chosen, rejected
    if before - now <= FALLEN * tokens:
        return
    good, bad = names_of_answers(run)
    ways = ["Fewer steps", "a lower learning_rate"]
    own = {"dpo": "a larger beta", "kto": "a larger beta", "orpo": "a smaller beta", "cpo": "a larger cpo_alpha"}
    ways += [own[run.recipe.objective]] if run.recipe.objective in own else []
    also = "; --objective orpo or cpo learns the chosen answers too" if run.recipe.objective in ("dpo", "simpo") else ""
    yield (
        f"The {good} answers became less likely, by {(before - now) / tokens:.2g} nats a token: log-probability "
        f"{before:,.1f} → {now:,.1f} an answer, of the {bad} ones {other_before:,.1f} → {other_now:,.1f}. Only the "
        f"difference is minimised, so both can fall, and what is generated can get worse. {', '.join(ways[:-1])} or "
        f"{ways[-1]} holds them{also}."
    )


def _change(run: ReportedRun, kind: str) -> tuple[float, float, float] | None:
    """The log-probability of an answer at the start and now, and its tokens; None if they are unknown."""
    keys = [f"{what}/{kind}" for what in ("logps", "lengths", "rewards")]
    evaluated = [row for row in run.evaluations if all(f"eval_{key}" in row for key in keys)]
    if evaluated and evaluated[-1]["step"]:
        values = [[row[f"eval_{key}"] for key in keys] for row in evaluated]
    else:
        ends = [found for key in keys if (found := first_and_last(run.training.values(key)))]
        values = [[each[i] for each in ends] for i in (0, 1)] if len(ends) == len(keys) else []
    if not values or values[-1][1] <= 0:
        return None
    logps, tokens, reward = values[-1]
    if run.recipe.declared.has_reference:  # which is the model at the start
        return logps - reward / run.recipe.reward_scale, logps, tokens
    return (values[0][0], logps, tokens) if len(values) > 1 else None


def _lengths(run: ReportedRun) -> Iterator[str]:
    """Lengths that tell the answers apart, and generated answers that grow."""
    means = [run.training.values(f"lengths/{kind}") for kind in ("chosen", "rejected")]
    chosen, rejected = (float(values.mean()) if len(values) else 0.0 for values in means)
    good, bad = names_of_answers(run)
    if chosen > 0 and rejected > 0 and max(chosen / rejected, rejected / chosen) >= MUCH_LONGER:
        longer = "longer" if chosen > rejected else "shorter"
        recipe = run.recipe
        divides = recipe.objective in ("simpo", "orpo") or recipe.dpo_loss in _PER_TOKEN
        way = ""
        if recipe.declared.rows == "pairs" and not divides:
            way = "; --objective simpo or --dpo_loss sigmoid_norm divides log-probabilities by the length"
        yield (
            f"The {good} answers are much {longer} than the {bad} ones: {chosen:,.0f} tokens on average, and "
            f"{rejected:,.0f}. The model may learn to write {longer} answers, and little else. Choose pairs of similar "
            f"length{way}."
        )
    answered = [row for row in run.evaluations if row.get("answers")]
    if len(answered) < 2:
        return
    first, last = answered[0], answered[-1]
    before, now, expected = (
        sum(len(answer[key]) for answer in row["answers"]) / len(row["answers"])
        for row, key in ((first, "text"), (last, "text"), (last, "reference"))
    )
    # Answers that do not end have a remark of their own.
    if now > GROWN * max(before, expected) and not last.get("num_unended_answers"):
        why = f", because the {good} ones of the data are longer" if chosen > rejected else ""
        yield (
            f"The generated answers became longer: {before:,.0f} characters on average {after(first['step'])}, "
            f"{now:,.0f} {after(last['step'])}, where {expected:,.0f} are expected (of the {len(last['answers'])} "
            f"answers below). The model may have learned to write more{why}."
        )


def _last_evaluation(run: ReportedRun) -> Row:
    """The last evaluation after a step; empty if there is none."""
    return next((row for row in reversed(run.evaluations) if row["step"]), {})


def _num_evaluated(run: ReportedRun) -> int:
    """The number of evaluation pairs; 0 if it is unknown."""
    evaluation = run.record["data"].get("evaluation")
    num = finite_number(evaluation.get("num_samples")) if isinstance(evaluation, dict) else None
    return int(num) if num and num >= 1 else 0


def _noise(num: int) -> float:
    """Two standard errors of a share of ``num`` pairs, near one half: 2 sqrt(0.5 (1 - 0.5) / num)."""
    return 1 / math.sqrt(num)

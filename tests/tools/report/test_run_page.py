"""A run at a glance: what is on the page is what the run left, and nothing in it can run or call home."""

import re

import pytest
from report_helpers import GRPO, evaluation_row, make_run, opened, pair_evaluation, record, rollout_row, step_row

from kit.system import lock
from kit.system.errors import UserError
from kit.tools.report.remarks import remarks
from kit.tools.report.run_page import differences, report_page, results, write_report, write_report_at_end
from kit.tools.report.runs import MOST_ODD, read_reported_run

MANY = range(1, 31)


def answers(text):
    return [{"prompt": "2 < 3?", "reference": "yes", "text": text, "exact": text == "yes"}]


def test_the_page_shows_what_the_run_left(tmp_path):
    rows = [evaluation_row(0, answers=answers("<script>no</script>")), *map(step_row, range(1, 5))]
    rows += [{"step": 5, "nonfinite": "loss nan", "samples": ["d:1"]}, evaluation_row(5, answers=answers("yes"))]
    starts = [{"step": 2, "time": "2026-01-02", "changed": ["seed: <1> -> 2"]}]
    folder = make_run(tmp_path / "run", rows, starts=starts)
    assert write_report(folder) == folder / "report.html"
    page = (folder / "report.html").read_text()
    ordered = ["not finished: 5 of 9 steps", "changed: seed: &lt;1&gt;", "<dd>50.0% → 50.0%</dd>", "<h2>Warnings"]
    ordered += [
        "<h2>Curves",
        "<figcaption>loss",
        "<h2>Loss spikes and skipped steps",
        "d:1",
        "<h2>Generated answers",
        "2 &lt; 3?",
    ]
    ordered += ["&lt;script&gt;no", ">yes</td>", "<h2>Run<", "FSDP2 on CPU, 2 processes", "<h2>Data<", "<h2>Recipe"]
    ordered += ["&lt;b&gt;.jsonl", "<h2>Versions", "2.13.0"]
    at = -1
    for text in ordered:
        at = page.find(text, at + 1)
        assert at > 0, text
    assert page.count("<script") == 1 and "<b>.jsonl" not in page and not re.search("(src|href)=", page)
    assert page.count("role=img") == 2 == page.count("class=mark")
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "report.html", "run.json"]


def test_a_run_that_had_no_step_yet_and_one_of_many_odd_steps(tmp_path):
    (make_run(tmp_path) / "metrics.jsonl").unlink()
    assert "0 of 9 steps" in report_page([read_reported_run(tmp_path)])
    odd = [step_row(i, loss_spike=3.0, samples=[f"s{i}."]) for i in range(1, MOST_ODD + 9)]
    page = report_page([opened(tmp_path, odd)])
    assert "s100." in page and "s101." not in page and f"{MOST_ODD + 8}, the first at step 1" in page


def test_the_status_says_how_far_it_came_and_a_report_at_the_end_never_fails(tmp_path, monkeypatch, capsys):
    write_report_at_end(make_run(tmp_path / "run"))
    write_report_at_end(tmp_path / "nothing")
    said = r"report: .*/run/report.html\nwarning: no report \(UserError: error: .*nothing"
    assert re.match(said, capsys.readouterr().out)
    for changes, status in (
        ({}, "not finished: 4 of 9 steps; the same command continues it"),
        ({"finished_steps": 4, "ended_early": "enough"}, "finished: 4 of 9 steps, enough"),
    ):
        assert opened(tmp_path, **changes).status == status

    def in_use(folder):
        raise UserError()

    monkeypatch.setattr(lock, "check_free", in_use)
    assert opened(tmp_path).status == "running: 4 of 9 steps"


def test_remarks_follow_from_the_metrics(tmp_path):
    good = [*map(step_row, MANY), evaluation_row(0, eval_loss=3.0), evaluation_row(30)]
    assert remarks(opened(tmp_path / "good", good, finished_steps=30)) == []
    dpo = {"objective": "dpo"}
    cases = [
        ([step_row(1), {"step": 2, "nonfinite": "nan", "samples": []}], {}, "Skipped steps (NaN or Inf"),
        ([step_row(step, loss=2.0) for step in MANY], {}, "The training loss did not fall: 2 in"),
        ([evaluation_row(2, eval_loss=1.0), evaluation_row(4)], {}, "The model overfits"),
        (
            [evaluation_row(4, answers=answers("x"), num_answers=35, num_truncated_answers=30)],
            {},
            "30 of 35 answers did not end within",
        ),
        ([step_row(step, data_wait_share=0.3) for step in MANY], {}, "30% of the time was spent waiting for data"),
        ([step_row(step, padding_share=0.4) for step in MANY], {}, "40% of the computed tokens were padding"),
        ([pair_evaluation(0, 0.0), pair_evaluation(30, 0.5)], dpo, "The accuracy is not above chance: 50.0% of the"),
        ([pair_evaluation(0, 0.0), pair_evaluation(30, 0.9, -50.0)], dpo, "Likelihood displacement: the log-prob"),
    ]
    for rows, recipe, text in cases:
        found = remarks(opened(tmp_path / "run", rows, recipe=recipe))
        assert [each for each in found if each.startswith(text)], (text, found)
    assert not remarks(opened(tmp_path / "run", [pair_evaluation(0, 0.0), pair_evaluation(30, 0.56)], recipe=dpo))


def test_a_run_with_rewards_shows_them_first_and_the_answers_of_its_first_and_last_rollout(tmp_path):
    runs = [opened(tmp_path / name, map(rollout_row, MANY), recipe=GRPO) for name in "ab"]
    for shown in map(report_page, (runs, runs[:1])):
        assert re.findall("<figcaption>([^<]*)", shown)[:2] == ["reward", "rewards/exact_match"]
    cells = re.findall("<td.*?>(.*?)</td>", shown.partition("Rollout samples")[2])
    assert cells[:10] == ["1", "ask 1", "&lt;yes&gt;", "no", "0.5", "", "", "", "maybe", "0.5"]
    assert cells[10] == "30" and results(runs)[1]["reward"] == "0.0100 → 0.3000"


def test_whole_conversations_with_tools_are_shown_with_their_rewards(tmp_path):
    answer = {"prompt": "What is 2 + 3?", "reference": "5", "text": "5", "exact": True, "reward": 1.0}
    rows = [evaluation_row(0, answers=[answer | {"conversation": "call add\n<6>\n5"}], eval_reward=0.0)]
    of_tools = {"completions/turns": 2.0, "tools/failures": 0.5, "completions/clipped_ratio": 0.6}
    rows += [*(rollout_row(step, **of_tools) for step in MANY)]
    rows += [evaluation_row(30, answers=[answer | {"conversation": "call add\n5\n5"}], eval_reward=0.5)]
    recipe = GRPO | {"tools": ["own.py:add"]}
    run = opened(tmp_path, rows, recipe=recipe)
    page = report_page([run])
    cells = re.findall("<td.*?>([^<]*)</td>", page.partition("Generated answers")[2])
    assert cells[:6] == ["What is 2 + 3?", "5", "call add\n&lt;6&gt;\n5", "call add\n5\n5", "yes", "1"]
    assert "white-space: pre-wrap" in page.partition("td {")[2].partition("}")[0]  # turns are lines
    captions = re.findall("<figcaption>([^<]*)", page)
    assert {"turns of a completion", "failed tool calls of a completion"} < {*captions}
    assert "reward. training: last 0.3. evaluation: last 0.5" in page
    assert "60% of the last completions were truncated at max_new_tokens or max_turns or max_length: raise it." in (
        remarks(run)
    )


def test_remarks_about_rewards(tmp_path):
    for changes, text in (
        ({"loss": 2.0}, ""),  # that it does not fall says nothing
        ({"frac_reward_zero_std": 0.9}, "90% of the last groups had zero reward variance"),
        ({"completions/clipped_ratio": 0.6}, "60% of the last completions were truncated at max_new_tokens: raise"),
        ({"rewards/overlong/failed": 4}, "The reward overlong failed for 120 completions, which were dropped."),
    ):
        found = remarks(opened(tmp_path, [rollout_row(step, **changes) for step in MANY], recipe=GRPO))
        assert "".join(found).startswith(text) and len(found) == bool(text)


def test_remarks_follow_from_the_record(tmp_path):
    values = record()
    values["data"]["sources"][0] |= {"num_truncated": 7, "num_skipped": 1}
    values["strategy"]["cpu_dry_run"] = True
    run = opened(tmp_path, [step_row(1)], **values)
    (tmp_path / "error.txt").write_text("error: no memory\n")
    assert remarks(run) == [
        "The run ended with an error:\nerror: no memory",
        "This was a dry run on a CPU of a config for GPUs: its speed and memory say nothing about GPUs.",
    ]


def test_several_runs_are_one_page_with_what_differs(tmp_path):
    one = opened(tmp_path / "one")
    rows = [step_row(1), evaluation_row(1, eval_loss=1.0), evaluation_row(2)]
    two = opened(tmp_path / "two", rows, recipe={"seed": 5})
    page = report_page([one, two])
    names = [str(tmp_path / "one"), str(tmp_path / "two")]
    assert f"<title>2 runs: {', '.join(names)}</title>" in page and "two, evaluation" in page
    assert differences([one, two]) == [{"": "seed", names[0]: "42", names[1]: "5"}]
    assert [row["best evaluation loss"] for row in results([one, two])] == [
        "2.2500 after step 4",
        "1.0000 after step 1",
    ]


def test_pictures_stand_beside_the_answers_and_tell_equal_questions_apart(tmp_path):
    one, two = ("data:image/jpeg;base64," + letters for letters in ("AAAA", "BBBB"))

    def answered(step, *pairs):
        answers = [
            {"prompt": "what?", "reference": "r", "text": text, "exact": False, "pictures": pictures}
            for text, pictures in pairs
        ]
        return evaluation_row(step, answers=answers)

    odd = [one, "javascript:no", "data:image/jpeg;base64,'onload=no", 3]
    rows = [
        step_row(1),
        answered(0, ("first of 1", odd), ("first of 2", [two])),
        answered(4, ("x", odd), ("y", [two])),
    ]
    page = report_page([opened(tmp_path, rows)])
    assert page.count("<img") == 2 and "javascript" not in page and "onload" not in page
    places = [page.index(text) for text in (one, "first of 1", ">x<", two, "first of 2", ">y<")]
    assert places == sorted(places)


def test_a_metric_that_is_no_number_is_left_out_and_text_in_it_stays_text(tmp_path):
    for odd in (None, 10**400, 1e308, "x\x1b\n<b>", [3], {"a": {"b": None}}):
        rows = [step_row(1), evaluation_row(1), step_row(2, loss=odd, grad_norm=odd, seconds=odd, loss_spike=odd)]
        rows += [
            evaluation_row(2, eval_loss=odd, intervals=odd, answers=odd, rollout=odd),
            {"step": 3, "nonfinite": odd, "samples": odd},
        ]
        page = report_page([opened(tmp_path, rows)])
        assert "\x1b" not in page and "<b>\n" not in page and "\n<b>" not in page, odd


def test_files_that_hold_something_else_end_a_report_with_words(tmp_path):
    for text in ("", "[" * 100_000, "null\n", "1" * 6000, '{"step":1e400}\n', "\0" * 9):
        make_run(tmp_path)
        (tmp_path / "metrics.jsonl").write_text(text)
        report_page([read_reported_run(tmp_path)])
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(UserError, match="no record of a run"):
            read_reported_run(tmp_path)
    make_run(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics.jsonl: cannot be read"):
        read_reported_run(tmp_path)

"""A run at a glance: what is on the page is what the run left, and nothing in it can run or call home."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from report_helpers import evaluation_row, make_run, opened_pairs, pair_evaluation, pair_row, record, step_row

from kit.errors import UserError
from kit.tools.report.chart import NUM_COLOURS
from kit.tools.report.metrics import MOST_ODD
from kit.tools.report.page import SCRIPT
from kit.tools.report.run_page import run_page, write_report, write_report_at_end


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path / "run")


def answer(folder, **values):
    """The last evaluation, with what the model answered."""
    row = {"step": 4, "eval_loss": 2.25, "eval_perplexity": 9.4877, "eval_tokens": 11, "answers": [values]}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_of_many_data_sets_the_largest_are_drawn_and_all_are_in_a_table(tmp_path):
    names = [f"set{i}" for i in range(200)]
    rows = []
    for step in range(1, 20):
        named = {f"loss/{name}": 200.0 - i for i, name in enumerate(names)}
        rows.append(step_row(step, **named, **{f"supervised_tokens/{name}": i for i, name in enumerate(names)}))
    rows.append(evaluation_row(19, **{f"eval_loss/{name}": 7.0 for name in names}))
    page = write_report(make_run(tmp_path, rows)).read_text()
    drawn = re.search(r"<figcaption><span class=title>training loss by data set.*?</div>", page)[0]
    assert re.findall(r"</i>(\w+) <b>", drawn) == [f"set{199 - i}" for i in range(NUM_COLOURS)]
    listed = page.partition("<h2>Loss by data set</h2>")[2].partition("</table>")[0]
    assert all(f">{name}</td>" in listed for name in names) and "200.0000</td>" in listed and "7.0000</td>" in listed
    assert page.count("<th ") < 60


def test_of_many_steps_to_look_at_the_first_are_listed_and_the_rest_counted(tmp_path):
    rows = [step_row(step, loss_spike=3.0, samples=[f"s{step}."]) for step in range(1, MOST_ODD + 31)]
    page = write_report(make_run(tmp_path, rows)).read_text()
    assert "s100." in page and "s101." not in page and "30 more are in metrics.jsonl" in page
    assert "130 steps, the first 1, were marked" in page


def test_the_page_shows_what_the_run_left(folder):
    answer(folder, prompt="2 < 3?", reference="yes", text="<script>no</script>", exact=False)
    assert write_report(folder) == folder / "report.html"
    page = (folder / "report.html").read_text()
    for text in (
        "FSDP2 on CPU, 2 processes",
        "4 x LlamaDecoderLayer",
        "2.25",
        "9.4877",
        "2.13.0",
        "2 &lt; 3?",
        "&lt;script&gt;no",
        "&lt;b&gt;.jsonl",
    ):
        assert text in page
    assert page.count("role=img") == 8
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "report.html", "run.json"]


def test_the_result_is_first_and_how_the_run_was_done_is_after_the_answers(folder):
    answer(folder, prompt="2?", reference="4", text="4", exact=True)
    page = write_report(folder).read_text()
    order = [
        "not finished: 4 of 9 steps",
        "<dl class=results>",
        "<h2>Curves",
        "<h2>Evaluation",
        "<h2>Answers",
        "<h2>Run<",
    ]
    order += ["FSDP2 on CPU", "<h2>Data", "<h2>Recipe", "<h2>Versions"]
    at = [page.index(text) for text in order]
    assert at == sorted(at)


def test_data_of_one_set_for_each_use_are_one_table(folder):
    values = record()
    values["data"]["train"] = {"num_samples": 5}
    values["data"]["sources"] = [
        {"name": "<mine>", "num_rows": 8, "num_samples": 7},
        {"name": "held", "num_samples": 3},
    ]
    page = write_report(make_run(folder, **values)).read_text().partition("<h2>Data</h2>")[2].partition("<h2>")[0]
    assert page.count("<table") == 1 and "training: &lt;mine&gt;" in page and "evaluation: held" in page
    cells = re.findall("<td data-name='[^']*'>([^<]*)</td>", page)
    assert cells == ["samples", "5", "3", "samples in the data set", "7", "", "rows", "8", ""]


def test_several_data_sets_have_their_own_numbers(folder):
    run = json.loads((folder / "run.json").read_text())
    run["data"]["sources"].append({"name": "<other>", "num_samples": 1234})
    (folder / "run.json").write_text(json.dumps(run))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text(
        "".join(
            json.dumps(row | ({"loss/one": 1.0, "loss/<other>": 2.0} if "loss" in row else {})) + "\n" for row in rows
        )
    )
    write_report(folder)
    page = (folder / "report.html").read_text()
    assert page.count("<h2>Data") == 1
    assert page.count("role=img") == 9 and "1,234" in page and "&lt;other&gt;" in page and "<other>" not in page


def test_steps_that_were_skipped_or_jumped_are_listed_with_their_samples(folder):
    write_report(folder)
    assert "Steps to look at" not in (folder / "report.html").read_text()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "nonfinite": "loss nan, gradient norm nan", "samples": ["d.jsonl:7"]}) + "\n")
        odd = {"step": 6, "loss": 9.0, "loss_spike": 3.04, "samples": ["<d>.jsonl:8", "d.jsonl:9"], "grad_norm": 1.0}
        odd |= {"learning_rate": 1e-3, "tokens_per_second": 9.0, "peak_memory_bytes": 1}
        file.write(json.dumps(odd) + "\n")
    write_report(folder)
    page = (folder / "report.html").read_text()
    assert "skipped: loss nan, gradient norm nan" in page and "loss 9, 3.0 times the usual" in page
    assert "&lt;d&gt;.jsonl:8, d.jsonl:9" in page


def test_nothing_in_it_runs_or_calls_home(folder):
    write_report(folder)
    page = (folder / "report.html").read_text()
    assert page.count("<script") == 1 and f"<script>{SCRIPT}</script>" in page
    assert not re.search(r"(src|href)=['\"]?(https?:)?//", page)


def test_a_run_without_evaluation_has_a_page_too(folder):
    rows = (folder / "metrics.jsonl").read_text().splitlines()[:1]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    write_report(folder)
    page = (folder / "report.html").read_text()
    assert page.count("role=img") == 7 and "Evaluation" not in page


def test_the_recipe_reads_as_it_was_written(folder):
    run = json.loads((folder / "run.json").read_text())
    chat = {
        "path": "<chat>.jsonl",
        "name": "",
        "config": None,
        "columns": {"q": "prompt", "a": "completion"},
        "weight": 3.0,
    }
    more = {"path": "more.jsonl", "name": "more", "config": None, "columns": None, "weight": 1.0}
    run["recipe"] |= {"dataset": [chat, more], "dataset_columns": {"b": "text"}, "max_length": 2048, "packing": True}
    (folder / "run.json").write_text(json.dumps(run))
    write_report(folder)
    page = (folder / "report.html").read_text()
    chat_line = "path: &lt;chat&gt;.jsonl, columns: q=prompt,a=completion, weight: 3"
    chosen, defaults = page.split("<details>")
    assert f"<pre>{chat_line}\npath: more.jsonl, name: more, weight: 1</pre>" in chosen
    for key, value in {"dataset_columns": "b=text", "packing": "true", "max_steps": "9"}.items():
        assert f"<td data-name='setting'>{key}</td><td data-name='value'>{value}</td>" in chosen
    assert "<td data-name='setting'>max_length</td><td data-name='value'>2048</td>" in defaults  # as it is by default
    assert "<td data-name='setting'>method</td>" not in chosen


def test_the_page_says_which_run_it_is_of_and_what_became_of_the_rows(folder, monkeypatch):
    run = json.loads((folder / "run.json").read_text())
    run["data"]["sources"][0]["num_truncated"] = 924
    (folder / "run.json").write_text(json.dumps(run))
    monkeypatch.chdir(folder)
    write_report(Path("."))
    page = (folder / "report.html").read_text()
    assert f"<title>{folder.name}: {folder}</title>" in page and f"<h1>{folder.name}</h1>" in page
    assert "cut at max_length" in page and "924" in page and "num_truncated" not in page


def test_what_a_model_answers_cannot_drive_a_terminal(folder):
    answer(folder, prompt="?", reference="!", text="\x1b[2J\ta\n", exact=False)
    write_report(folder)
    page = (folder / "report.html").read_text()
    assert "\x1b" not in page and "\\x1b[2J\ta\n" in page


def test_a_run_that_was_killed_has_a_page_and_a_folder_without_a_run_a_word(folder, tmp_path, capsys):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    page = write_report(folder).read_text()
    assert page.count("role=img") == 8 and "not finished: 4 of 9 steps" in page
    write_report_at_end(folder)
    assert capsys.readouterr().out == f"report: {folder}/report.html\n"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('\n5\n[]\n{"step": "x"}\n{"step": 5, "loss": "abc", "samples": 3}\n' + "[" * 200_000 + "\n")
    assert write_report(folder).read_text().count("role=img") == 8
    (folder / "metrics.jsonl").unlink()  # before the first step
    assert write_report(folder).read_text().count("role=img") == 0
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    write_report_at_end(folder)
    assert "warning: no report (UserError: " in capsys.readouterr().out
    with pytest.raises(UserError, match=r"nothing/run.json: no record of a run .*; expected the folder of a run"):
        write_report(tmp_path / "nothing")


@pytest.mark.parametrize(("objective", "good", "bad"), [("dpo", "chosen", "rejected"), ("kto", "good", "bad")])
def test_evaluations_of_preferences_are_a_table_without_what_does_not_change(folder, objective, good, bad):
    rows = [pair_evaluation(0), pair_row(1), pair_evaluation(1, nll_loss=0.25, kl=0.5)]
    page = run_page(opened_pairs(folder, rows, settings={"objective": objective}))
    part = page.partition("<h2>Evaluation</h2>")[2].partition("</table>")[0]
    assert re.findall("<th scope=col>([^<]*)</th>", part) == [
        "after step",
        "loss",
        "accuracy",
        "margin",
        f"reward of {good}",
        f"reward of {bad}",
        f"log-probability of {good}",
        f"log-probability of {bad}",
        "loss of chosen",
        "kl",
    ]
    assert "87.5%</td>" in part and "perplexity" not in page


def test_answers_are_shown_before_and_after(folder):
    answers = [{"prompt": "2 + 2?", "reference": "4", "text": text, "exact": text == "4"} for text in ("<fish>", "4")]
    rows = [evaluation_row(0, answers=answers[:1]), step_row(1), evaluation_row(1, answers=answers[1:])]
    page = write_report(make_run(folder, rows)).read_text()
    cells = re.findall("<td data-name='([^']*)'>([^<]*)</td>", page[page.index("<h2>Answers") :])
    assert cells[:3] == [("asked", "2 + 2?"), ("expected", "4"), ("before training", "&lt;fish&gt;")]
    assert cells[3:5] == [("after step 1", "4"), ("exact", "yes")]


def test_a_restart_is_listed_with_what_was_changed(folder):
    starts = [{"step": 0, "time": "2026-01-01T00:00:00+00:00", "changed": []}]
    starts.append({"step": 2, "time": "2026-01-02T00:00:00+00:00", "changed": ["seed: <1> -> 2"]})
    page = write_report(make_run(folder, starts=starts)).read_text()
    text = "continued after step 2 (2026-01-02 00:00:00 UTC), changed: seed: &lt;1&gt; → 2"
    assert f"</i>{text}</p>" in page and f"<title>{text}</title>" in page


def test_many_data_sets_are_rows_and_few_are_columns(folder):
    values = record()
    values["data"]["sources"] = [{"name": f"d{i}", "num_samples": 7, "num_truncated": 0} for i in range(9)]
    page = write_report(make_run(folder, **values)).read_text()
    assert page.count("<td data-name='data set'>") == 9
    values["data"]["sources"] = values["data"]["sources"][:3]
    page = write_report(make_run(folder, **values)).read_text()
    assert "<td data-name='d2'>7</td>" in page and "cut at max_length" not in page  # none was


@pytest.mark.slow
def test_a_browser_shows_the_values_under_the_pointer_and_at_the_keys(folder, tmp_path):
    """The page as it is, but with a pointer that moves by itself, and keys that are pressed by themselves."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("needs Chromium")
    page = write_report(folder).read_text()
    assert "Content-Security-Policy" in page
    pointer = """<script>
        document.getElementById("x-tokens").checked = true;
        const svg = document.querySelector("svg"), box = svg.getBoundingClientRect();
        const at = { clientX: box.left + box.width * 0.55, clientY: box.top + 50 };
        svg.dispatchEvent(new PointerEvent("pointermove", at));
        const other = document.querySelectorAll("figure > svg")[2];  // the learning rate, of steps 1 to 4
        const press = (key) => other.dispatchEvent(new KeyboardEvent("keydown", { key }));
        ["End", "ArrowLeft", "ArrowLeft", "Tab"].forEach(press);
        </script>"""
    (tmp_path / "page.html").write_text(re.sub("<meta http-equiv=Content[^>]*>", "", page) + pointer)
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    command += ["--window-size=1000,1000", "--dump-dom", f"file://{tmp_path}/page.html"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    figure, _, of_keys, *_ = map(html.unescape, re.findall("<figure.*?</figure>", shown, re.DOTALL))
    assert re.findall("<b>([^<]*)</b>", figure) == ["4", "2.25"]  # the loss of step 2, and the only evaluation
    assert "learning rate" in of_keys and ">tokens 200<" in of_keys
    assert ">tokens 200<" in figure and '<path class="cursor"' in figure

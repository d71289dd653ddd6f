"""A run at a glance: what is on the page is what the run left, and nothing in it can run or call home."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from helpers import actual_strategy

from kit.config.recipe import Recipe
from kit.errors import UserError
from kit.report.run_page import write_report, write_report_at_end


@pytest.fixture
def folder(tmp_path):
    recipe = Recipe(model_name_or_path="m", method="lora", dataset="<b>.jsonl").model_dump(mode="json")
    data = {"fingerprint": "ab", "train": {"num_samples": 7}, "evaluation": {"num_samples": 3}}
    data["sources"] = [{"name": "one", "num_samples": 7}]
    run = {"recipe": recipe, "strategy": asdict(actual_strategy()), "data": data, "versions": {"torch": "2.13.0"}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    rows = [
        {"step": step, "loss": 5 - step / 2, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second": 9.0}
        | {"peak_memory_bytes": 2**30}
        for step in range(1, 5)
    ]
    rows += [{"step": 4, "eval_loss": 2.25, "eval_perplexity": 9.4877, "eval_tokens": 11, "eval_exact_match": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def answer(folder, **values):
    """The last evaluation, with what the model answered."""
    row = {"step": 4, "eval_loss": 2.25, "eval_perplexity": 9.4877, "eval_tokens": 11, "answers": [values]}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


@pytest.mark.slow
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
    assert page.count("<svg") == 6 and "<td>eval_dataset</td>" not in page
    assert not (folder / ".report.partial").exists()


@pytest.mark.slow
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
    assert page.count("<svg") == 7 and "1,234" in page and "&lt;other&gt;" in page and "<other>" not in page


@pytest.mark.slow
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


@pytest.mark.slow
def test_nothing_in_it_runs_or_calls_home(folder):
    write_report(folder)
    page = (folder / "report.html").read_text()
    assert "<script" not in page and not re.search(r"(src|href)=['\"]?(https?:)?//", page)


@pytest.mark.slow
def test_a_run_without_evaluation_has_a_page_too(folder):
    rows = (folder / "metrics.jsonl").read_text().splitlines()[:1]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    write_report(folder)
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 5 and "Evaluation" not in page


@pytest.mark.slow
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
    chat_line = "path: &lt;chat&gt;.jsonl, columns: q=prompt,a=completion, weight: 3.0"
    assert f"<pre>{chat_line}\npath: more.jsonl, name: more, weight: 1.0</pre>" in page
    for cell in ("b=text", "2048", "yes"):
        assert f"<td>{cell}</td>" in page


@pytest.mark.slow
def test_the_page_says_which_run_it_is_of_and_what_became_of_the_rows(folder, monkeypatch):
    run = json.loads((folder / "run.json").read_text())
    run["data"]["sources"][0]["num_truncated"] = 924
    (folder / "run.json").write_text(json.dumps(run))
    monkeypatch.chdir(folder)
    write_report(Path("."))
    page = (folder / "report.html").read_text()
    assert f"<title>{folder.name}: {folder}</title>" in page and f"<h1>{folder.name}</h1>" in page
    assert "num_truncated" in page and "924" in page


@pytest.mark.slow
def test_what_a_model_answers_cannot_drive_a_terminal(folder):
    answer(folder, prompt="?", reference="!", text="\x1b[2J\ta\n", exact=False)
    write_report(folder)
    page = (folder / "report.html").read_text()
    assert "\x1b" not in page and "\\x1b[2J\ta\n" in page


@pytest.mark.slow
def test_a_run_that_was_killed_has_a_page_and_a_folder_without_a_run_a_word(folder, tmp_path, capsys):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    page = write_report(folder).read_text()
    assert page.count("<svg") == 6 and "not finished: 4 steps so far" in page
    write_report_at_end(folder)
    assert capsys.readouterr().out == f"report: {folder}/report.html\n"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('\n5\n[]\n{"step": "x"}\n{"step": 5, "loss": "abc"}\n' + "[" * 200_000 + "\n")
    assert write_report(folder).read_text().count("<svg") == 6
    (folder / "metrics.jsonl").write_text('{"step": 1, "samples": 3}\n')
    write_report_at_end(folder)
    assert "warning: no report (" in capsys.readouterr().out
    (folder / "metrics.jsonl").unlink()  # before the first step
    assert write_report(folder).read_text().count("<svg") == 5
    with pytest.raises(UserError, match=r"nothing/run.json: no record of a run .*; expected the folder of a run"):
        write_report(tmp_path / "nothing")

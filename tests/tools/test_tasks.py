"""``kit score --tasks`` gives the scores of lm-evaluation-harness itself, and names what it cannot open."""

import json
import subprocess
import sys

import pytest
from data_helpers import chat, write
from helpers import ROOT

lm_eval = pytest.importorskip("lm_eval")

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: {text}
"""
ANSWERED = """\
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOSEN = """\
output_type: multiple_choice
doc_to_choice: ["two", "eight", "nine"]
doc_to_target: "{{answer}}"
"""


@pytest.fixture
def tasks(tmp_path):
    """A folder of tasks on a local file: ``counted`` is generated, ``chosen`` has choices, and some are not well."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = tmp_path / "asked.jsonl"
    write(data, *[{"question": f"{colour} cat", "answer": "eight"} for colour in ("red", "green", "blue", "black")])

    def task(name, kind, text='"{{question}}"', data=data):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data, text=text) + kind)

    task("counted", ANSWERED)
    task("chosen", CHOSEN)
    task("with_code", ANSWERED, text="!function own.question")
    (folder / "own.py").write_text("def question(doc):\n    return doc['question']\n")
    task("unsafe", ANSWERED + "unsafe_code: true\n")
    task("no_data", ANSWERED, data=tmp_path / "nothing.jsonl")
    task("long", ANSWERED.replace("12", "4096"))
    (folder / "damaged.yaml").write_text("task: damaged\n  x: [1\n")
    return folder


def score(*words, **environment):
    command = [sys.executable, "-m", "kit.cli.main", "score", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_scores_are_those_of_lm_eval(finetune, model_folder, tmp_path, tasks, method):
    held_out = tmp_path / "eval.jsonl"
    write(held_out, chat("red cat", "eight"))
    run = finetune.ok("run", method=method, max_steps=4, learning_rate=1e-2)
    status, out, err = score(run.folder, "--tasks", "counted,chosen", "--include_path", tasks, "--base")
    assert status == 0, err
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [row["is_base"] for row in rows] == [False, True] and rows[0]["chat_template"]
    assert rows == [json.loads(line) for line in (run.folder / "tasks.jsonl").read_text().splitlines()]
    assert "after step 4" in (run.folder / "report.html").read_text()

    final = run.folder / "final"
    for row, is_adapted in zip(rows, (True, False), strict=True):
        arguments = {"pretrained": str(final if method == "full" and is_adapted else model_folder), "dtype": "float32"}
        arguments |= {"tokenizer": str(final)} | ({"peft": str(final)} if method == "lora" and is_adapted else {})
        theirs = lm_eval.simple_evaluate(
            "hf",
            arguments,
            ["counted", "chosen"],
            batch_size=8,
            device="cpu",
            apply_chat_template=True,
            task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks)),
        )["results"]
        for name, task in row["tasks"].items():
            assert task["scores"] == {key: theirs[name][key] for key in task["scores"]} and task["scores"], name

    (checkpoint,) = (run.folder / "checkpoints").iterdir()
    status, out, err = score(checkpoint, "--tasks", tasks / "chosen.yaml")
    assert status == 0, err
    (row,) = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
    assert row["step"] == 4 and row["tasks"]["chosen"] == rows[0]["tasks"]["chosen"]


@pytest.mark.slow
def test_what_cannot_be_opened_is_named_before_weights_are_read(model_folder, tasks):
    names = "counte,gsm8k,no_data,damaged"
    status, _, said = score(model_folder, "--tasks", names, "--include_path", tasks)
    assert status == 2 and "Traceback" not in said
    assert "did you mean 'counted'?" in said and "damaged.yaml" in said and "no_data cannot be opened" in said
    assert "gsm8k cannot be opened" in said and "its data come from the hub" in said  # of no network
    status, out, said = score(model_folder, "--tasks", "unsafe,with_code", "--include_path", tasks)
    assert status == 2 and "--confirm_run_unsafe_code" in said and "with_code.yaml" in out
    status, _, said = score(model_folder, "--tasks", "long", "--include_path", tasks)
    assert status == 2 and "--max_new_tokens" in said
    status, _, said = score(model_folder, "--tasks", "chosen", "--include_path", tasks, "--config", "ddp")
    assert status == 2 and "--config single" in said

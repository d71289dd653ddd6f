"""``kit chat`` answers as the evaluation of its run does, and a base without its adapter."""

import shutil
from ast import literal_eval

import pytest
from data_helpers import chat, write
from helpers import matrix, typed


@pytest.mark.slow
@pytest.mark.parametrize("method", matrix(["lora", "full"]))
def test_greedy_answers_are_those_of_the_evaluation(finetune, model_folder, tmp_path, method):
    questions = ["red green blue", "small cat", "seven birds"]
    held_out = tmp_path / "eval.jsonl"
    write(held_out, *[chat(question, "eight") for question in questions])
    run = finetune.ok("run", method=method, max_steps=4)
    flags = {"eval_dataset": held_out, "predict_with_generate": "true", "max_new_tokens": 12}
    scored = finetune.score("scored", model_name_or_path=run.folder / "final", **flags)
    expected = [
        literal_eval(line.removeprefix("answer ")) for line in scored.output.splitlines() if line.startswith("answer ")
    ]
    assert len(expected) == 3 and any(expected)

    def talk(*words):
        command = ["-m", "kit.cli.main", "chat", *words, "--max_new_tokens", "12"]
        done = typed(*command, text="\n".join(questions))
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert talk(str(run.folder)) == "".join(f"{answer}\n" for answer in expected)
    if method == "lora":
        both = talk(str(run.folder), "--base")
        assert both.count("tuned: ") == both.count("base: ") == 3
        assert all(f"tuned: {answer}\n" in both for answer in expected)
    (checkpoint,) = (run.folder / "checkpoints").iterdir()
    assert talk(str(checkpoint)) == talk(str(run.folder))
    shard = next(checkpoint.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1  # of the same length
    shard.write_bytes(content)
    done = typed("-m", "kit.cli.main", "chat", str(checkpoint), text="red")
    assert done.returncode == 2 and shard.name in done.stderr


@pytest.mark.slow
def test_a_run_on_plain_text_is_asked_by_plain_text_and_shows_it_on_its_card(finetune, tmp_path):
    data = tmp_path / "plain.jsonl"
    write(data, *[{"prompt": text, "completion": "eight"} for text in ("red", "green blue", "small cat")])
    run = finetune.ok("run", dataset=data, max_steps=2)
    assert 'tokenizer("Once upon a time", add_special_tokens=False' in (run.folder / "final/README.md").read_text()
    answers = []
    for words in ([], ["--plain"], ["--chat_template", "chatml"]):
        done = typed("-m", "kit.cli.main", "chat", str(run.folder), "--max_new_tokens", "8", *words, text="red")
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout)
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.slow
def test_a_model_without_a_template_takes_plain_text(model_folder, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(model_folder, plain, ignore=shutil.ignore_patterns("chat_template.jinja"))

    def talk(*words):
        done = typed("-m", "kit.cli.main", "chat", str(plain), "--max_new_tokens", "4", *words, text="red green")
        return done.returncode, done.stdout, done.stderr

    status, _, said = talk()
    assert status == 2 and "--plain, which sends your text as the prompt" in said
    assert talk("--plain", "--temperature", "1", "--top_p", "0.9")[0] == 0
    for words, says in ((["--config", "ddp"], "--config single"), (["--base"], "--base: this is a full model")):
        status, _, said = talk("--plain", *words)
        assert status == 2 and says in said

"""``kit chat`` answers as the evaluation of its run does, and a base without its adapter."""

import shutil
import wave
from ast import literal_eval
from types import SimpleNamespace

import data_helpers
import pytest
from data_helpers import ADD, ADDER, COUNT, byte_level_tokenizer, write
from helpers import matrix, typed

from kit.cli.main import main
from kit.data.chat.template import resolve_template
from kit.data.chat.turns import Drafters
from kit.rollouts.tools.tool_environment import Tools
from kit.system.errors import UserError
from kit.tools import chat
from kit.tools.chat import Conversation
from kit.tools.opened import Opened


@pytest.mark.slow
@pytest.mark.parametrize("method", matrix(["lora", "full"]))
def test_greedy_answers_are_those_of_the_evaluation(finetune, model_folder, tmp_path, method):
    questions = ["red green blue", "small cat", "seven birds"]
    held_out = tmp_path / "eval.jsonl"
    write(held_out, *[data_helpers.chat(question, "eight") for question in questions])
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


OWN = (
    ADDER
    + '''
class Counter:
    def reset(self, **row):
        self.calls = 0
        return " Go!"

    def count(self):
        """Count."""
        self.calls += 1
        return self.calls

class OfRows:
    def reset(self, route, **row):
        pass

    def count(self):
        """Count."""
'''
)


@pytest.fixture
def talked(recipe, tmp_path, monkeypatch):
    """A conversation in which the model writes what is given; and the prompts that it reads."""
    (tmp_path / "own.py").write_text(OWN)
    tokenizer = byte_level_tokenizer(eos_token="<|im_end|>")
    source = resolve_template(tokenizer, "chatml", None)
    opened = []

    def talk(turns, environment="Counter", **row):
        own = f"{tmp_path}/own.py"
        settings = recipe(objective="grpo", tools=f"{own}:add", environment=f"{own}:{environment}", max_turns=3)
        tools = Tools(settings, source, tokenizer)
        opened.append(tools)
        template, _ = Drafters(source, tokenizer, "assistant").of(False, {})
        policy = SimpleNamespace(tokenizer=tokenizer)
        model = Opened(policy, template, [tools.turns.end], None, settings, tools=tools)
        left, prompts = [*turns], []

        def answer(model, ids, num_messages, pictures):
            prompts.append(tokenizer.decode(ids))
            text = left.pop(0)
            print(text)
            return [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id], text

        monkeypatch.setattr(chat, "answer", answer)
        return Conversation(model, [], row), prompts

    yield talk
    for each in opened:
        each.close()


def test_calls_are_made_and_shown_and_the_model_reads_their_results(talked, capsys):
    conversation, prompts = talked([COUNT, ADD + "\n" + COUNT, "Two.", ADD[:-20], "Three.", COUNT, COUNT, COUNT])
    assert capsys.readouterr().out == " Go!\n"
    conversation.messages = conversation.ask("Count", ())
    shown = capsys.readouterr().out
    assert shown == f"{COUNT}\ncount -> 1\n{ADD}\n{COUNT}\nadd -> 3\ncount -> 2\nTwo.\n"
    assert prompts[0].endswith("<|im_start|>user\nCount Go!<|im_end|>\n<|im_start|>assistant\n")
    replied = "<|im_end|>\n<|im_start|>user\n<tool_response>\n{}\n</tool_response>"
    assert prompts[1].startswith(prompts[0] + COUNT + replied.format(1)) and prompts[2].startswith(prompts[1] + ADD)
    conversation.messages = conversation.ask("More", ())
    assert "unknown -> error: malformed call" in capsys.readouterr().out
    assert prompts[3] == prompts[2] + "Two.<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    conversation.ask("On", ())  # in the same environment; what was malformed is not written again
    assert "More<|im_end|>\n<|im_start|>assistant\nThree.<|im_end|>" in prompts[5] and len(prompts) == 8
    assert capsys.readouterr().out.endswith("count -> 5\n(max_turns 3)\n")


def test_an_environment_that_needs_a_row_is_refused_without_one(talked):
    with pytest.raises(UserError, match=r"--environment: reset failed: .*'route'"):
        talked([], "OfRows")
    talked([], "OfRows", route=["Porto"])


@pytest.mark.parametrize(
    ("family", "kind", "message"),
    [
        ("qwen2_vl", "image", "/none: no such file\n"),
        ("qwen2_vl", "audio", "error: audio: given, but this model does not accept audio"),
        ("", "audio", "error: audio: given, but this model does not accept audio; expected a model that reads audio"),
    ],
)
def test_media_that_a_model_cannot_be_given_are_refused_before_its_weights_are_read(
    vision_model, model_folder, tmp_path, capsys, family, kind, message
):
    shutil.copytree(vision_model(family) if family else model_folder, folder := tmp_path / "model")
    for weights in folder.glob("*.safetensors"):
        weights.write_bytes(b"")
    with wave.open(str(tmp_path / "a.wav"), "wb") as sound:
        sound.setparams((1, 2, 16_000, 0, "NONE", ""))
        sound.writeframes(bytes(16_000))
    file = tmp_path / ("a.wav" if kind == "audio" else "none")
    assert main(["chat", str(folder), f"--{kind}", str(file), "--chat_template", "chatml"]) == 2
    assert message in capsys.readouterr().err

"""The model card names what others can open, and shows how to use what lies beside it."""

import re
from types import SimpleNamespace

import yaml
from huggingface_hub import ModelCard

from kit.config.recipe import Recipe
from kit.config.settings.method import MethodSettings
from kit.export.card import converted_card, model_card, serving_section, state_of
from kit.train.loop_state import LoopState

TOKENIZER = SimpleNamespace(chat_template="{{ messages }}", bos_token=None)
STRATEGY = SimpleNamespace(type="single", num_processes=1, mixed_precision="no")


def state(last=None, first=None, step=160):
    """After ``step`` steps: the metrics of the last evaluation, and of the one before training."""
    evaluated = {"last_evaluation": last or {}, "evaluated_step": step if last else -1}
    return LoopState(step=step, first_evaluation=first or {}, first_evaluated_step=0 if first else -1, **evaluated)


def card_of(model="some/base-1.5B_v2", stops=None, loop=None, **changes):
    values = {"model_name_or_path": str(model), "dataset": "d.jsonl", "max_length": 8, **changes}
    return model_card(Recipe(**values), STRATEGY, loop or state(), TOKENIZER, "chat", stops or {})


def about(card):
    """The metadata, as the Hub's library reads them."""
    return ModelCard(card).data


def test_the_state_at_the_end_of_a_run_is_in_its_metrics(tmp_path):
    rows = ['{"step": 0, "eval_loss": 3.0}', '{"step": 4, "loss": 1.0}', '{"step": 4, "eval_loss": 0.5}', '{"ste']
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    found = state_of(tmp_path)
    assert (found.step, found.first_evaluation, found.current_evaluation) == (4, {"eval_loss": 3.0}, {"eval_loss": 0.5})
    assert found.first_evaluated_step == 0 and state_of(tmp_path / "gone").step == 0


def test_metrics_before_and_after_are_in_the_card():
    first = {"eval_loss": 2.5, "eval_exact_match": 0.0, "eval_tokens": 90}
    last = {"eval_loss": 0.125, "eval_exact_match": 0.75, "eval_tokens": 90}
    card = card_of(loop=state(last, first))
    assert "| | before training | after step 160 |\n|---|---|---|\n| `eval_loss` | 2.5 | 0.125 |" in card
    assert "eval_tokens" not in card
    assert "| |" not in card_of()


def test_a_folder_is_no_base_of_the_metadata_and_its_path_is_not_on_the_card(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    card = card_of(folder, dataset=str(tmp_path / "orders.jsonl"))
    assert about(card).base_model is None and about(card).datasets is None and str(tmp_path) not in card
    assert "- base: a folder named `my-model`, not from the Hub" in card and "- data: `orders`" in card
    cached = tmp_path / "models--some--base/snapshots/12ab"
    cached.mkdir(parents=True)
    assert about(card_of(cached)).base_model == "some/base" and about(card_of("some/base")).base_model == "some/base"


HOSTILE = [
    "a\nlicense: mit\n---\n# b",
    "`a` <script>b</script> ``",
    "[a](https://b.c)\x1b[2J\u202e",
    "{a: !!python/object b}",
    "a|b\\|<img src=x onerror=alert(1)>",
]


def test_names_of_strangers_are_only_names_in_a_card():
    def card_with(name):
        loop = state({f"eval_loss/{name}": 1.0}, step=1)
        labels = {"objective": "classify", "labels": [name, "b"]}
        return card_of(name, {name: 2}, loop, dataset=[{"path": "d.jsonl", "name": name}], new_tokens=[name], **labels)

    for name in HOSTILE:
        card, usual = card_with(name), card_with("/a")
        assert "\x1b" not in card and "\u202e" not in card, name
        front, body = card.removeprefix("---\n").split("\n---\n", 1)
        usual_front, usual_body = usual.removeprefix("---\n").split("\n---\n", 1)
        assert set(yaml.safe_load(front)) == set(yaml.safe_load(usual_front)), name
        assert len(body.splitlines()) == len(usual_body.splitlines()), name
        outside = re.sub(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", "", body.split("```python")[0])  # of code spans
        assert not re.search(r"[<>\[\]{!`\\]", outside), name
        row = next(line for line in body.splitlines() if line.startswith("| `eval_loss/"))
        assert len(re.findall(r"(?:\\.|[^|\\])+", row.strip("| "))) == 2, row  # the cells of GitHub's tables


def test_the_code_opens_what_was_trained():
    """By its own class, on the base as it was trained on, and with the tokens that end answers."""
    of_run = (
        STRATEGY,
        state(),
        TOKENIZER,
        "chat",
        {"<|im_end|>": 2},
        "AutoModelForImageTextToText",
        "FineGrainedFP8Config",
    )
    for method, merged in (("full", ""), ("lora", ""), ("lora", "bfloat16")):
        recipe = Recipe(model_name_or_path="some/base", dataset="d.jsonl", max_length=8, method=method)
        card = model_card(recipe, *of_run, merged=merged)
        is_adapter = method == "lora" and not merged
        assert about(card).library_name == ("peft" if is_adapter else "transformers")
        assert about(card).base_model == "some/base"
        assert bool(merged) == ("the adapter is merged into its base, in bfloat16" in card)
        opened = "base" if is_adapter else "folder"
        assert (
            f"model = transformers.AutoModelForImageTextToText.from_pretrained({opened}, " in card
            and "CausalLM" not in card
        )
        assert ("model = PeftModel.from_pretrained(model, folder)" in card) == is_adapter
        assert ("quantization_config=transformers.FineGrainedFP8Config(dequantize=True))" in card) == is_adapter
        assert ("GenerationConfig.from_pretrained" in card) == is_adapter
        assert "stop tokens: `<|im_end|>`" in card
    unknown = model_card(MethodSettings(model_name_or_path="some/base"), None, LoopState(), TOKENIZER, "plain")
    assert "data and training: not known" in unknown and 'tokenizer("Once upon a time"' in unknown


def test_the_code_gives_the_text_that_was_learned():
    tokenizer = SimpleNamespace(chat_template="x", bos_token="<s>")
    for objective, form, shown in (
        ("sft", "ended", 'tokenizer(tokenizer.bos_token + "Once upon a time", add_special_tokens=False'),
        ("reward", "ended", 'bos_token + "a question\\nan answer" + tokenizer.eos_token, add_special_tokens=False'),
        ("reward", "chat", '"assistant", "content": "Hi!"}]\ninputs = tokenizer.apply_chat_template('),
        ("reward", "plain", 'tokenizer("Once upon a time", return'),
        ("classify", "chat", '"content": "Hello!"}]\ninputs = tokenizer.apply_chat_template('),
    ):
        recipe = Recipe(model_name_or_path="some/base", dataset="d.jsonl", max_length=8, objective=objective)
        loader = "AutoModelForCausalLM" if objective == "sft" else "AutoModelForSequenceClassification"
        card = model_card(recipe, STRATEGY, state(), tokenizer, form, loader=loader)
        assert shown in card and ("apply_chat_template" in card) == (form == "chat"), card


def test_of_paths_of_this_machine_the_card_has_the_last_part(tmp_path):
    (tmp_path / "own.py").write_text("")
    rewards = [f"{tmp_path}/own.py:judge", "regex:a/b"]
    card = card_of(objective="grpo", rewards=rewards)
    assert str(tmp_path) not in card and "own.py:judge" in card and "regex:a/b" in card


def test_the_card_of_other_files_says_how_they_were_compared():
    plain = card_of(loop=state({"eval_loss": 1.0})) + serving_section("vllm serve x")
    card = converted_card(plain, "gguf", "Written by a program:", ["equal at 100 %"], "\n```bash\nserve a.gguf\n```\n")
    assert about(card).tags == ["gguf"] and about(card).base_model == "some/base-1.5B_v2"
    assert "```python" not in card and "vllm" not in card and card.endswith("```bash\nserve a.gguf\n```\n")
    assert "Written by a program:\n\n- equal at 100 %" in card and "| `eval_loss` | 1 |" in card
    quantised = converted_card(plain, "compressed-tensors", "Quantised:", ["x"])
    assert "```python" in quantised and quantised.endswith("```bash\nvllm serve x\n```\n")

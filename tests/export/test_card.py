"""The model card names what others can open, and shows how to use what lies beside it."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from kit.config.recipe import Recipe
from kit.config.settings.method import MethodSettings
from kit.export.card import PLACEHOLDER, card_without_run, gguf_card, model_card, state_of
from kit.export.final import write_model
from kit.model.load import build_model, open_config
from kit.model.plan import LoadPlan
from kit.model.tokenizer import open_tokenizer
from kit.strategy.strategies import SINGLE
from kit.train.loop_state import LoopState

STRATEGY = SimpleNamespace(type=SINGLE, num_processes=1, mixed_precision="no")


def state(last=None, first=None, step=160):
    """After ``step`` steps: the metrics of the last evaluation, and of the one before training."""
    evaluated = {"last_evaluation": last or {}, "evaluated_step": step if last else -1}
    return LoopState(step=step, first_evaluation=first or {}, first_evaluated_step=0 if first else -1, **evaluated)


def card_of(model="some/base-1.5B_v2", stops=None, loop=None, is_chat=True, **changes):
    values = {"model_name_or_path": str(model), "dataset": "d.jsonl", "max_length": 8, **changes}
    return model_card(Recipe(**values), STRATEGY, loop or state(), is_chat, stops or {})


def about(card):
    """The metadata, as the Hub's library reads them."""
    return ModelCard(card).data


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_snippet_loads_generation_settings_only_where_plain_loading_does_not(method):
    card = card_of(method=method, stops={"<|im_end|>": 2})
    assert "answers end with `<|im_end|>`" in card
    assert ("GenerationConfig.from_pretrained" in card) == (method == "lora")
    bare = card_of(method=method)
    assert "answers end" not in bare and "GenerationConfig" not in bare


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_quantised_base_is_opened_as_it_was_trained_on(method):
    recipe = Recipe(model_name_or_path="some/base", dataset="d.jsonl", max_length=8, method=method)
    card = model_card(recipe, STRATEGY, state(), True, {}, "AutoModelForCausalLM", "FineGrainedFP8Config")
    opens = "quantization_config=FineGrainedFP8Config(dequantize=True))" in card
    imports = "from transformers import AutoTokenizer, FineGrainedFP8Config" in card
    assert (opens, imports) == ((method == "lora"),) * 2


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_model_of_text_and_images_is_opened_by_its_own_class(method):
    recipe = Recipe(model_name_or_path="some/base", dataset="d.jsonl", max_length=8, method=method)
    card = model_card(recipe, STRATEGY, state(), True, {}, "AutoModelForImageTextToText")
    opened = "folder" if method == "full" else '"some/base"'
    assert f"model = AutoModelForImageTextToText.from_pretrained({opened}, " in card
    assert ("model = PeftModel.from_pretrained(model, folder)" in card) == (method == "lora")
    assert "CausalLM" not in card


def test_a_merged_model_is_one_of_transformers_that_names_what_was_trained_and_needs_no_base():
    recipe = Recipe(model_name_or_path="some/base", dataset="d.jsonl", max_length=8, method="qlora")
    card = model_card(recipe, STRATEGY, state({"eval_loss": 1.0}), True, {"</s>": 2}, merged="bfloat16")
    assert about(card).library_name == "transformers" and about(card).base_model == "some/base"
    assert "(qlora)" in card and "merged into its base, in bfloat16" in card and "| eval_loss | 1 |" in card
    assert "model = AutoModelForCausalLM.from_pretrained(folder," in card and "peft" not in card
    assert "GenerationConfig" not in card and "before the merge" in card


def test_a_model_without_a_record_of_its_run_says_so():
    settings = MethodSettings(model_name_or_path="some/base")
    card = card_without_run(settings, True, {}, "AutoModelForCausalLM", "float32")
    assert about(card).base_model == "some/base" and "data and training: not known" in card
    assert "merged into its base, in float32" in card and "AutoModelForCausalLM.from_pretrained(folder," in card


def test_the_card_of_gguf_files_says_how_they_were_compared_and_served():
    card = gguf_card(card_of(loop=state({"eval_loss": 1.0})), ["a-F16.gguf"], ["equal at 100 %"], True)
    assert about(card).tags == ["gguf"] and about(card).base_model == "some/base-1.5B_v2"
    assert "```python" not in card and "llama-server --jinja -m a-F16.gguf\nollama create" in card
    assert "equal at 100 %" in card and "| eval_loss | 1 |" in card
    assert about(card).to_dict().get("library_name") is None and "ollama" not in gguf_card(card_of(), ["a"], [], False)


def test_the_state_at_the_end_of_a_run_is_in_its_metrics(tmp_path):
    rows = ['{"step": 0, "eval_loss": 3.0}', '{"step": 4, "loss": 1.0}', '{"step": 4, "eval_loss": 0.5}', '{"ste']
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    found = state_of(tmp_path)
    assert (found.step, found.first_evaluation, found.current_evaluation) == (4, {"eval_loss": 3.0}, {"eval_loss": 0.5})
    assert found.first_evaluated_step == 0 and state_of(tmp_path / "gone").step == 0


def test_a_card_of_usual_names_has_no_marks_around_them():
    card = card_of(loop=state({"eval_loss/d": 1.0}, step=1))
    assert "\n# base-1.5B_v2, fine-tuned (lora)\n" in card and "\n- base: `some/base-1.5B_v2`\n" in card
    assert "\n- data: `d`\n" in card and "\n| eval_loss/d | 1 |\n" in card


def test_metrics_before_and_after_are_in_the_card_and_the_last_ones_in_the_metadata():
    first = {"eval_loss": 2.5, "eval_exact_match": 0.0, "eval_tokens": 90}
    last = {"eval_loss": 0.125, "eval_exact_match": 0.75, "eval_tokens": 90}
    card = card_of(loop=state(last, first))
    assert "| | before training | after step 160 |\n|---|---|---|\n| eval_loss | 2.5 | 0.125 |" in card
    assert "eval_tokens" not in card
    results = about(card).eval_results
    assert {result.metric_type: result.metric_value for result in results} == {"loss": 0.125, "exact_match": 0.75}
    late = state(last, first)
    late.first_evaluated_step = 40
    assert "| | after step 40 | after step 160 |" in card_of(loop=late)
    assert about(card_of()).eval_results is None and "| |" not in card_of()


OF_PAIRS = {"eval_loss": 0.6461, "eval_rewards/chosen": -0.0198, "eval_rewards/accuracies": 0.85}
OF_PAIRS |= {"eval_logps/rejected": -11.58, "eval_lengths/chosen": 23.1, "eval_tokens": 90}


def test_a_card_of_pairs_names_objective_settings_reference_and_what_the_metrics_are():
    card = card_of(loop=state(OF_PAIRS, {"eval_loss": 0.6931}), objective="dpo", global_batch_size=32)
    assert "\n# base-1.5B_v2, fine-tuned (dpo, lora)\n" in card and "- 160 steps of 32 pairs\n" in card
    assert (
        "- objective: dpo, beta 0.1, dpo_loss sigmoid, label_smoothing 0\n"
        "- learned from pairs of a chosen and a rejected answer to the same prompt\n"
        "- reference: the base\n"
    ) in card
    assert "| eval_loss | 0.6931 | 0.6461 |\n| eval_rewards/chosen | | -0.0198 |\n" in card.replace("|  |", "| |")
    assert "eval_lengths" not in card and "eval_tokens" not in card
    data = about(card)
    assert data.tags == ["dpo"] and {result.dataset_name for result in data.eval_results} == {"d"}
    named = {result.metric_type: (result.metric_name, result.metric_value) for result in data.eval_results}
    assert named["loss"] == ("loss of dpo", 0.6461) and named["rewards/accuracies"] == (None, 0.85)
    assert set(named) == {"loss", "rewards/chosen", "rewards/accuracies", "logps/rejected"}


def test_another_objective_is_named_with_its_settings():
    cases = [
        ({"objective": "simpo"}, ["objective: simpo, beta 2, simpo_gamma 0.5", "learned from pairs of"]),
        (
            {"objective": "kto", "beta": 0.2, "adapter_name_or_path": "a"},
            [
                "objective: kto, beta 0.2, desirable_weight 1, undesirable_weight 1",
                "learned from answers with a label that says whether they are good",
                "reference: the base, with the adapter from which it began",
                "160 steps of 32 answers",
            ],
        ),
        ({"objective": "dft"}, ["objective: dft\n", "160 steps of 32 samples"]),
        ({"label_smoothing_factor": 0.1}, ["objective: sft, label_smoothing_factor 0.1\n"]),
    ]
    for case in cases:
        changes, lines = case
        card = card_of(**changes)
        assert all(f"\n- {line}" in card for line in lines), card
        assert ("reference" in card) == any("reference" in line for line in lines), case


def test_of_the_cross_entropy_of_answers_no_objective_is_named():
    assert "objective" not in card_of() and about(card_of()).tags is None


def test_a_folder_is_no_base_of_the_metadata_and_its_path_is_not_on_the_card(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    card = card_of(folder, dataset=str(tmp_path / "orders.jsonl"))
    assert about(card).base_model is None and about(card).datasets is None and str(tmp_path) not in card
    assert "- base: a folder named `my-model`, not from the Hub" in card and "- data: `orders`" in card
    cached = tmp_path / "models--some--base/snapshots/12ab"
    cached.mkdir(parents=True)
    assert about(card_of(cached)).base_model == "some/base" and about(card_of("some/base")).base_model == "some/base"


@pytest.mark.parametrize(
    ("front", "licence"),
    [
        ("license: apache-2.0", {"license": "apache-2.0"}),
        (
            "license: other\nlicense_name: own\nlicense_link: LICENSE",
            {"license": "other", "license_name": "own", "license_link": "LICENSE"},
        ),
        ("license: [a, b]", {}),
        ("license: other\nlicense_name: {a: b}", {}),
        ("license: 'a b <script>'", {}),
        ("license: {a: b", {}),
        ("tags: [a]", {}),
    ],
)
def test_the_licence_of_the_base_is_that_of_its_own_card_or_is_left_out(tmp_path, front, licence):
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n# A base\n")
    card = card_of(tmp_path)
    found = about(card).to_dict()
    assert {key: value for key, value in found.items() if key.startswith("license")} == licence
    shown = licence.get("license_name", licence.get("license"))
    assert (f"- licence of the base: `{shown}`" if licence else "- licence of the base: not in the files") in card


def test_the_card_of_a_data_set_of_the_hub_is_read_from_the_cache(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n")
    asked = []

    def in_cache(name, file, revision=None, repo_type=None):
        asked.append((name, file, repo_type))
        return str(tmp_path / file) if repo_type == "dataset" else None

    monkeypatch.setattr("kit.export.card.try_to_load_from_cache", in_cache)
    card = card_of(dataset="some/data")
    assert ("some/data", "README.md", "dataset") in asked and about(card).datasets == ["some/data"]
    assert "- data: `some/data`\n- licence of the data: `cc-by-nc-4.0`" in card and about(card).license is None


HOSTILE = [
    "a\nlicense: mit\n---\n# b",
    "---",
    "a: b # c",
    "`a` <script>b</script> ``",
    "[a](https://b.c)\x1b[2J\u202e",
    "{a: !!python/object b}",
]


def hostile_card(name):
    loop = state({f"eval_loss/{name}": 1.0}, step=1)
    dataset = [{"path": "d.jsonl", "name": name}]
    return card_of(name, {name: 2}, loop, dataset=dataset, new_tokens=[name])


def test_names_of_strangers_are_only_names_in_a_card():
    for name in HOSTILE:
        card, usual = hostile_card(name), hostile_card("/a")
        assert "\x1b" not in card and "\u202e" not in card, name
        front, body = card.removeprefix("---\n").split("\n---\n", 1)
        usual_front, usual_body = usual.removeprefix("---\n").split("\n---\n", 1)
        assert set(yaml.safe_load(front)) == set(yaml.safe_load(usual_front)), name
        assert len(body.splitlines()) == len(usual_body.splitlines()), name
        outside = re.sub(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", "", body.split("```python")[0])  # of code spans
        assert not re.search(r"[<>\[\]{!`\\]", outside), name


def test_a_card_holds_no_credential(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "0123456789abcdef")
    assert "0123456789abcdef" not in card_of(dataset=[{"path": "d.jsonl", "name": "0123456789abcdef"}])


@pytest.mark.slow
@pytest.mark.parametrize(("method", "is_chat"), [("full", True), ("full", False), ("lora", True)])
def test_the_code_on_the_card_answers_without_the_kit(model_folder, tmp_path, method, is_chat):
    settings = MethodSettings(model_name_or_path=str(model_folder), method=method)
    model = build_model(settings, open_config(settings), LoadPlan(compute_dtype="float32", device="cpu"))
    weights = {name: torch.ones_like(p) / 64 for name, p in model.named_parameters() if p.requires_grad}
    tokenizer = open_tokenizer(settings)
    if is_chat:
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    stops = {"red": 7}
    folder = tmp_path / "final"
    folder.mkdir()
    card = card_of(model_folder, stops, is_chat=is_chat, method=method)
    write_model(folder, model, model.state_dict() if method == "full" else weights, tokenizer, card, None, stops)
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    code = code.replace(PLACEHOLDER, str(folder)) + "\nprint('sampled', output.shape)\n"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "sampled torch.Size([1, " in result.stdout

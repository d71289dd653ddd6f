"""Reward, classification and embedding heads learn the same on every topology, and other libraries open them."""

import json
import shutil

import numpy as np
import pytest
import torch
from helpers import ROOT, export, make_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2Config, GPT2Model

from kit.model.pretrained.heads import check_head, labels_of
from kit.system.errors import TrainingError, UserError

pytestmark = pytest.mark.slow
WORDS = "red green blue one two three four five six seven".split()


def rows_of(objective, num, seed=0):
    draw = np.random.default_rng(seed)
    for _ in range(num):
        words = list(draw.choice(WORDS, draw.integers(3, 12)))
        text = " ".join(words)
        better, worse = f"{text} {words[0]}", f"{text} {words[1]} no"
        yield {
            "reward": {
                "prompt": [{"role": "user", "content": text}],
                "chosen": better,
                "rejected": worse,
                "margin": 0.5,
            },
            "classify": {"text": text, "label": int(draw.integers(3)) if words[0] != "red" else 2},
            # Of what is trained on, several texts have the same positive.
            "embed": {
                "anchor": text,
                "positive": better if seed else words[0],
                "negative": [worse] * int(draw.integers(3)),
            },
        }[objective]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The flags of each objective."""
    folder, flags = tmp_path_factory.mktemp("heads"), {}
    for objective in ("reward", "classify", "embed"):
        flags[objective] = {"objective": objective, "learning_rate": 1e-3, "global_batch_size": 24}
        for seed, (name, num) in enumerate((("dataset", 40), ("eval_dataset", 9))):
            path = folder / f"{objective}-{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(objective, num, seed)))
            flags[objective][name] = path
    return flags


def opened(folder, kind):
    return kind.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder)


def test_a_classifier_is_scored_on_labels_that_it_knows_in_their_order(finetune, fp32, data):
    """Its scores in transformers: the covering array."""
    run = finetune.ok("run", config=fp32["single"], method="full", save_steps=6, **data["classify"])
    final = run.folder / "final"
    assert "vllm serve" not in run.output + (final / "README.md").read_text()
    assert json.loads((final / "config.json").read_text())["id2label"] == {"0": "0", "1": "1", "2": "2"}
    assert run.rows[-1]["details"]["confusions"]
    scored = finetune.score("scored", model_name_or_path=final, eval_dataset=data["classify"]["eval_dataset"])
    assert scored.status == 0 and '"confusions"' in scored.output, scored.output
    one = data["classify"]["eval_dataset"].with_name("one.jsonl")
    one.write_text('{"text": "one two", "label": 1}\n' * 2)
    scored = finetune.score("one", model_name_or_path=run.folder / "checkpoints/step-00000006", eval_dataset=one)
    assert scored.status == 0 and '"eval_loss"' in scored.output, scored.output
    bad = data["classify"]["eval_dataset"].with_name("bad.jsonl")
    bad.write_text('{"text": "one", "label": 1}\n{"text": "two", "label": 3}\n')
    scored = finetune.score("bad", model_name_or_path=final, eval_dataset=bad)
    assert scored.status == 2 and "bad.jsonl:2 label: '3' is no label of this model" in scored.output, scored.output
    named = {"model_name_or_path": final, "eval_dataset": data["classify"]["eval_dataset"]}
    scored = finetune.score("order", **named, objective="classify", labels="2,1,0")
    assert scored.status == 2 and "in another order than the scores of the model" in scored.output, scored.output


def test_an_adapter_of_a_head_keeps_the_order_of_its_labels(finetune, data, tmp_path):
    run = finetune.ok("run", method="lora", labels="2,0,1", **data["classify"])
    again = {"adapter_name_or_path": run.folder / "final", "method": "lora", **data["classify"]}
    more = finetune.ok("more", **again, eval_on_start=True)
    assert more.info["recipe"]["labels"] == ["2", "0", "1"]
    assert more.rows[0]["eval_loss"] == pytest.approx(run.rows[-1]["eval_loss"], rel=1e-3)
    again["adapter_name_or_path"] = shutil.copytree(run.folder / "final", tmp_path / "alone")
    refused = finetune("refused", **again)
    assert refused.status == 2 and "the adapter does not hold their order" in refused.output, refused.output
    file = tmp_path / "alone/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"task_type": None}))
    refused = finetune("untold", **again, labels="2,0,1")
    assert refused.status == 2 and "holds an adapter for no task" in refused.output, refused.output


def test_a_head_on_plain_texts_has_no_chat_template_wherever_it_is_written(
    finetune, fp32, model_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(model_folder.parent)  # an adapter is opened from any folder
    flags = {"objective": "reward", "method": "lora", "model_name_or_path": model_folder.name, "max_steps": 2}
    rows = [{"prompt": word, "chosen": f"{word} red", "rejected": word} for word in WORDS]
    dataset = tmp_path / "plain.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = finetune.ok("run", config=fp32["single"], **flags, dataset=dataset, eval_dataset=dataset)
    monkeypatch.chdir(tmp_path)
    checkpoint = run.folder / "checkpoints/step-00000002"
    base = f"--model_name_or_path={model_folder}"  # which the run names by a relative path
    export(checkpoint, tmp_path / "adapter", base)
    export(checkpoint, tmp_path / "merged", base, "--merge")
    export(run.folder, tmp_path / "again")
    for folder in (run.folder / "final", tmp_path / "adapter", tmp_path / "merged", tmp_path / "again"):
        assert AutoTokenizer.from_pretrained(folder).chat_template is None, folder
    card = (tmp_path / "again/README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0].replace("path/to/this/folder", f"{tmp_path}/again")
    shown = code.replace("a question\\nan answer", "red\\nred red").replace("print(", "found.append(")
    found: list = []
    exec(shown, {"found": found})
    model, tokenizer = opened(tmp_path / "again", AutoModelForSequenceClassification)
    assert json.loads((tmp_path / "again/config.json").read_text())["dtype"] == "float32"  # as the base
    (row,) = [row for row in run.rows if "eval_reward_chosen" in row]
    texts = [f"{row['prompt']}\n{row['chosen']}{tokenizer.eos_token}" for row in rows]
    rewards = [model(torch.tensor([tokenizer(text).input_ids])).logits.item() for text in texts]
    assert row["eval_reward_chosen"] == pytest.approx(np.mean(rewards), rel=1e-4)
    assert found[0].item() == pytest.approx(rewards[0], rel=1e-4)
    monkeypatch.setattr("kit.export.source.template_beside", lambda head, template, form: template)
    for flags in ([], ["--merge"]):
        with pytest.raises(TrainingError, match="has another chat template"):
            export(checkpoint, tmp_path / "wrong", base, *flags)
    with pytest.raises(UserError) as caught:
        export(run.folder, tmp_path / "file", "--format=gguf")
    assert "gguf needs a causal language model" in str(caught.value) and "llama_cpp" not in str(caught.value)


def test_an_embedder_is_what_sentence_transformers_reads_and_is_scored_as_that(finetune, fp32, data, tmp_path):
    run = finetune.ok("run", config=fp32["single"], method="full", pooling="mean", **data["embed"])
    read = {
        name: json.loads((run.folder / "final" / name).read_text())
        for name in ("modules.json", "1_Pooling/config.json")
    }
    assert [each["type"].rpartition(".")[2] for each in read["modules.json"]] == ["Transformer", "Pooling", "Normalize"]
    assert read["1_Pooling/config.json"]["pooling_mode_mean_tokens"] and (run.folder / "final/2_Normalize").is_dir()
    alone = {"model_name_or_path": shutil.copytree(run.folder / "final", tmp_path / "alone"), "objective": "embed"}
    scored = finetune.score("scored", config=fp32["single"], **alone, eval_dataset=data["embed"]["eval_dataset"])
    assert json.loads(scored.output.splitlines()[-1])["eval_loss"] == pytest.approx(run.rows[-1]["eval_loss"], rel=1e-5)


def test_the_pad_token_may_be_the_last_row_of_the_embedding(finetune, data, tmp_path):
    model = make_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"<{i}>" for i in range(len(tokenizer) % 2)])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id % 2 == 0
    make_model(model, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    tokenizer.save_pretrained(model)
    finetune.ok("padded", **data["classify"] | {"model_name_or_path": model, "max_steps": 1})


def test_a_family_with_dropout_has_no_embedding_unless_it_is_that_of_another_head():
    config = GPT2Config(n_layer=1, n_embd=8, n_head=1, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    config.architectures = ["GPT2Model"]
    with torch.device("meta"):
        model = GPT2Model(config)
    assert config.summary_first_dropout and not list(check_head(model))
    config.attn_pdrop = 0.1
    assert "attn_pdrop 0.1: dropout would make the two GradCache passes differ" in str(*check_head(model))


@pytest.mark.parametrize("id2label", [{0: "a", 7: "b"}, {0: "a", 1: "a"}])
def test_a_model_whose_labels_have_no_names_of_their_own_is_refused(id2label):
    with pytest.raises(UserError, match="expected a name for each number from 0 to 1, no name twice"):
        labels_of(GPT2Config(id2label=id2label))


TINY = ROOT / "recipes/tiny"
REFUSED = [
    ("classify", {"predict_with_generate": True}, "predict_with_generate: given with objective classify"),
    ("embed", {"matryoshka_dims": "16,64"}, "matryoshka_dims: 64, but embeddings of"),
    ("embed", {"lora_dropout": 0.1, "method": "lora"}, "dropout would make the two GradCache passes differ"),
    (
        "reward",
        {"model_name_or_path": TINY / "model", "adapter_name_or_path": TINY / "sft", "method": "lora"},
        "holds an adapter for CAUSAL_LM",
    ),
]


@pytest.mark.parametrize(("objective", "flags", "words"), REFUSED)
def test_what_a_head_cannot_have_is_refused_by_name(finetune, data, objective, flags, words):
    run = finetune("refused", **data[objective] | flags)
    assert run.status == 2 and words in run.output, run.output


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["a", ["b"]], "classes.jsonl:2 label: a list, and at "),
        ([[0, 1], [1, 0]], "label: each row has 0, 1; expected rows that differ in it\n    -> of a multi-hot list"),
        ([[0, 1], [0, 0]], "classes.jsonl:2 label: [0, 0]; expected the names or the numbers of its labels"),
    ],
)
def test_labels_that_teach_nothing_are_named(finetune, tmp_path, labels, words):
    path = tmp_path / "classes.jsonl"
    path.write_text("".join(json.dumps({"text": "a text", "label": label}) + "\n" for label in labels))
    run = finetune("refused", objective="classify", dataset=path)
    assert run.status == 2 and words in run.output, run.output

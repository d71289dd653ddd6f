"""Options in every pair, each row of them a real run along the whole way, with a check at each station.

A row trains three steps, is stopped and continued, is compared with the run on one process and with the run without
packs, is scored, opened by transformers and peft, merged or exported, and asked. What cannot go together is in
``REFUSED``, and is refused before any weight is read, in the words that are there.
"""

import functools
import json
import re
import shutil
import signal
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from covering import Rules, covering_rows
from helpers import WORDS, Finetune, from_scale, make_model, signal_in_step, small_tiles, typed
from PIL import Image
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer, BitsAndBytesConfig
from vision_models import make_vision_model, picture

pytestmark = pytest.mark.slow

FACTORS = {
    name: values.split()
    for name, values in {
        "family": "llama qwen3 gpt2 mixtral gemma3_text bloom phi3",
        "tied": "no yes",
        "stored": "float32 bfloat16",
        "method": "full frozen lora dora rslora oft qlora",
        "dropout": "0 0.1",
        "targets": "all some head experts",
        "whole": "none head embedding",
        "tokens": "none new trained",
        "data": "messages completion text ids mixture",
        "packing": "no yes",
        "streaming": "no yes",
        "long": "truncate keep_end drop split",
        "train_on": "assistant last all",
        "objective": "sft dft eaft dpo orpo simpo cpo kto",
        "extra": "none neftune smoothing z_loss loraplus router",
        "optim": "adamw_torch_fused adamw_bf16 adamw_8bit paged_adamw_32bit muon lion_32bit",
        "precision": "no bf16 fp16",
        "topology": "single ddp fsdp fsdp1",
        "checkpointing": "no yes selective",
        "compile": "no yes",
        "micro": "1 2",
        "stop": "copy signal",
        "keep": "last best",
        "answers": "none generated",
        "dtype": "default float32 float16",
        "chat": "no yes",
    }.items()
}
# The names of: two linear layers, the head, the embedding.
MODULES = {
    "gpt2": ("c_attn", "lm_head", "wte"),
    "bloom": ("query_key_value", "lm_head", "word_embeddings"),
    "phi3": ("qkv_proj", "lm_head", "embed_tokens"),
}
LAYERS = {"gpt2": "transformer.h", "bloom": "transformer.h", "gemma3": "model.language_model.layers"}
LLAMA_MODULES = ("q_proj,v_proj", "lm_head", "embed_tokens")

# Rules: values of factors, separated by |, that do not meet. Those of the first list would mean nothing: such a row
# would be that of another value. Those of the second are refused, in words that the pattern finds.
NOTHING = [
    {"method": "full|frozen", "dropout": "0.1"},
    {"method": "full|frozen", "targets": "some|head|experts"},
    {"targets": "experts", "family": "llama|qwen3|gpt2|gemma3_text|bloom|phi3|gemma3"},
    {"method": "full|frozen", "extra": "loraplus"},
    {"method": "full|frozen", "chat": "yes", "dtype": "float16|float32"},  # exports a checkpoint as it is
    {"data": "text|ids|mixture", "objective": "dpo|orpo|simpo|cpo|kto"},
    {"data": "ids", "tokens": "new"},
    {"data": "ids|completion|text", "train_on": "last|all"},
    {"method": "full|frozen", "whole": "head|embedding"},
    {"method": "full|frozen", "tokens": "trained"},
    {"extra": "router", "family": "llama|qwen3|gpt2|gemma3_text|bloom|phi3"},
]
ADAPTERS = "lora|dora|rslora|oft|qlora"
PAIRS = "dpo|orpo|simpo|cpo|kto"
REFUSED: list[tuple[dict[str, str], str]] = [
    ({"extra": "neftune", "objective": PAIRS}, "neftune_noise_alpha: objective .* does not read it"),
    ({"extra": "smoothing", "objective": f"dft|eaft|{PAIRS}"}, "label_smoothing_factor: objective .* does not read it"),
    ({"extra": "z_loss", "objective": f"dft|eaft|{PAIRS}"}, "z_loss_coef: objective .* does not read it"),
    ({"train_on": "all", "objective": PAIRS}, "train_on: all, with objective .*, which compares or scores texts"),
    ({"long": "split", "objective": PAIRS}, "whose samples must stay whole"),
    ({"streaming": "yes", "objective": "kto"}, "estimates the KL term on mismatched"),
    ({"streaming": "yes", "objective": "dpo", "method": "full|frozen"}, "reference model runs before the first step"),
    ({"method": "oft", "dropout": "0.1"}, "lora_dropout: given with adapter_type oft"),
    ({"method": "oft", "whole": "head|embedding"}, "lora_modules_to_save: given with adapter_type oft"),
    ({"method": "oft", "tokens": "new"}, "new_tokens: given with adapter_type oft"),
    ({"method": "oft", "tokens": "trained"}, "trainable_tokens: given with adapter_type oft"),
    ({"method": "oft", "extra": "loraplus"}, "loraplus_lr_ratio: given with adapter_type oft"),
    ({"method": "oft", "compile": "yes"}, "torch_compile: given with adapter_type oft"),
    ({"method": "oft", "optim": "muon"}, "optim: given with adapter_type oft"),
    ({"method": ADAPTERS, "optim": "adamw_bf16"}, "optim: adamw_bf16 with method"),
    ({"optim": "adamw_bf16", "precision": "no|fp16"}, "bf16 weights give bf16 matmuls"),
    ({"precision": "fp16", "topology": "fsdp1"}, "mixed_precision: fp16 under FSDP1"),
    ({"optim": "adamw_bf16", "topology": "fsdp1"}, "optim: adamw_bf16 under FSDP1"),
    ({"optim": "adamw_8bit|paged_adamw_32bit|lion_32bit", "topology": "fsdp|fsdp1"}, "cannot read sharded parameters"),
    ({"method": "dora", "topology": "fsdp1"}, "use_dora: .*DoRA reads whole base weights"),
    ({"optim": "muon", "topology": "fsdp1"}, "optim: muon under FSDP1"),
    ({"tokens": "new|trained", "method": ADAPTERS, "topology": "fsdp1"}, "tokens: .*FSDP1 cannot train single rows"),
    ({"method": "frozen", "topology": "fsdp1"}, "train_only: under FSDP1"),
    ({"compile": "yes", "topology": "fsdp1"}, "torch_compile: not supported with FSDP1"),
    ({"data": "messages|completion|ids|mixture", "long": "split"}, "conversations cannot be chunked"),
    ({"data": "text|ids", "answers": "generated"}, "predict_with_generate: .* has no prompts"),
    ({"whole": "head", "tied": "yes"}, "are tied here, and peft"),
    ({"whole": "embedding", "tied": "yes", "family": "gpt2|bloom"}, "are tied here, and peft"),
    ({"whole": "embedding", "tied": "yes", "topology": "fsdp1"}, "head that trains next to adapters"),
    ({"whole": "head", "topology": "fsdp1"}, "head that trains next to adapters"),
    ({"targets": "head", "topology": "fsdp1"}, "head that trains next to adapters"),
    ({"targets": "head", "tied": "yes"}, "an adapter on them cannot be merged"),
    ({"targets": "head", "whole": "head"}, "lora_modules_to_save"),
    ({"targets": "head", "tokens": "new|trained"}, "lm_head gets an adapter"),
    ({"family": "mixtral", "targets": "experts", "method": "oft"}, "only LoRA adapts fused experts"),
    ({"family": "mixtral", "targets": "experts", "method": "dora"}, "does not work with use_dora"),
    ({"family": "mixtral", "targets": "experts", "topology": "fsdp1"}, "an adapter on experts"),
    ({"family": "gpt2", "method": "oft"}, "cannot adapt GPT2LMHeadModel with"),
    ({"objective": "grpo", "method": "full", "kl": "k2|k3", "topology": "fsdp1"}, "beta: under FSDP1 with method full"),
]


# Rollouts have factors of their own, and not all of the others.
ROLLOUTS = {
    name: values.split()
    for name, values in {
        "family": "llama gpt2 mixtral gemma3",
        "method": "lora full frozen dora qlora",
        "data": "messages completion mixture",
        "packing": "no yes",
        "long": "drop",
        "objective": "grpo",
        "optim": "adamw_torch_fused muon",
        "precision": "no bf16 fp16",
        "topology": "single ddp fsdp fsdp1",
        "checkpointing": "no yes",
        "micro": "1 2",
        "stop": "copy signal",
        "keep": "last best",
        "answers": "none generated",
        "chat": "no yes",
        "policy": "dapo grpo dr_grpo gspo cispo rloo sapo",
        "sampling": "whole cut",
        "iterations": "1 2",
        "kl": "0 k2 k3",
        "groups": "all dynamic",
        "images": "no yes",
        "sequence": "whole parallel",
        "tiles": "no yes",
    }.items()
}
NOTHING.append({"policy": "rloo", "kl": "k2"})

# Teachers, heads, images, sequence parallelism and tiled MLPs: factors of their own, and some of the others.
TASKS = {
    name: values.split()
    for name, values in {
        "family": "llama gpt2 gemma3",
        "method": "lora full qlora",
        "data": "messages completion",
        "packing": "no yes",
        "objective": "sft dpo distil reward classify embed",
        "teacher": "none beside stored",
        "labels": "one several numbers",
        "pooling": "last mean",
        "images": "no yes",
        "sequence": "whole parallel",
        "tiles": "no yes",
        "optim": "adamw_torch_fused muon",
        "precision": "no bf16 fp16",
        "topology": "single ddp fsdp fsdp1",
        "checkpointing": "no yes",
        "micro": "1 2",
        "stop": "copy signal",
        "keep": "last best",
        "dtype": "default float32",
        "chat": "no yes",
    }.items()
}
HEADS = "reward|classify|embed"
NOTHING += [
    {"images": "yes", "family": "llama|gpt2|mixtral"},
    {"images": "yes", "data": "completion|mixture"},
    {"objective": f"sft|dpo|{HEADS}", "teacher": "beside|stored"},
    {"objective": "sft|dpo|distil|reward|embed", "labels": "several|numbers"},
    {"objective": "sft|dpo|distil|reward|classify", "pooling": "mean"},
    {"objective": "embed", "data": "messages"},
    {"objective": HEADS, "chat": "yes"},
    {"sequence": "parallel", "topology": "single"},
]
REFUSED += [
    ({"objective": "distil", "teacher": "none"}, "teacher: none given"),
    (
        {"family": "gemma3", "sequence": "parallel", "topology": "ddp|fsdp|fsdp1"},
        "sequence_parallel_size: 2, with a multimodal model",
    ),
    ({"tiles": "yes", "checkpointing": "no"}, "tiled_mlp: true, with gradient_checkpointing auto"),
    ({"tiles": "yes", "topology": "fsdp1"}, "tiled_mlp: under FSDP1"),
    ({"objective": HEADS, "family": "gemma3"}, "is a gemma3, for which transformers has no head"),
    ({"objective": "distil", "teacher": "beside|stored", "topology": "fsdp1"}, "teacher: under FSDP1"),
    ({"tiles": "yes", "checkpointing": "yes", "family": "gpt2|mixtral"}, "have no gated MLP"),
    ({"objective": "embed", "packing": "yes"}, "packing: given with objective embed"),
]


def is_rounded_or_alone(row: dict[str, str]) -> bool:
    """Nothing exact can be said of it on another topology, so that other rows come first."""
    return row["precision"] != "no" or row["topology"] == "single" or row["dropout"] != "0"


# Rows that compile take a minute each: they have only the pairs that need it, and come last.
FACTORS |= {name: TASKS[name][:1] for name in ("teacher", "labels", "pooling", "images", "sequence", "tiles")}
RULES = Rules([*NOTHING, *(rule for rule, _ in REFUSED)])
PLAIN = covering_rows(FACTORS | {"compile": ["no"]}, RULES)
COMPILED = covering_rows(FACTORS, RULES, covered=PLAIN)
ROWS = [*sorted(PLAIN, key=is_rounded_or_alone), *COMPILED]
OF_TASKS, OF_ROLLOUTS = (
    sorted(covering_rows({name: values[:1] for name, values in FACTORS.items()} | own, RULES), key=is_rounded_or_alone)
    for own in (TASKS, ROLLOUTS)
)


def name_of(row: dict[str, str]) -> str:
    shown = (factor if value == "yes" else value for factor, value in row.items())
    return "-".join(value for value in shown if value not in ("no", "none", "0"))


# --- what the runs read


@functools.cache
def _model(folder: Path, family: str, tied: bool, stored: str) -> Path:
    """A random model of the family, with the tokenizer of the tests."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if family == "gemma3":
        return make_vision_model(family, folder / family)
    path = make_model(folder / f"{family}-{tied}-{stored}")
    (path / "model.safetensors").unlink()
    if family in ("gpt2", "bloom"):
        shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
        if family == "bloom":
            shape = {"hidden_size": 64, "n_layer": 2, "n_head": 4}
        shape |= {name: 0.0 for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop") if family == "gpt2"}
    else:
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 256}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        if family == "gemma3_text":
            shape |= {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
        if family == "mixtral":
            shape |= {"num_local_experts": 4}
    shape |= {"vocab_size": 320, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, so that each of them counts
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(getattr(torch, stored)).save_pretrained(path)
    return path


@functools.cache
def _teacher(student: Path) -> Path:
    """The student with other weights."""
    from safetensors.torch import load_file, save_file

    path = shutil.copytree(student, student.with_name(f"teacher-of-{student.name}"))
    weights = {
        name: each + torch.randn(each.shape, generator=torch.manual_seed(1)) * 0.05
        for name, each in load_file(path / "model.safetensors").items()
    }
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def _say(seed: int, count: int) -> str:
    return " ".join(WORDS[(seed * 7 + i * i * 3 + i) % len(WORDS)] for i in range(count))


def _rows(row: dict[str, str], count: int, folder: Path, longest: int = 0) -> list[dict]:
    """Rows of the kind that the row's data and objective ask for; the last one of ``longest`` words."""
    made = []
    for i in range(count):
        asked, answer, other = (
            _say(i, 2 + i % 3),
            _say(i + 1, longest if longest and i == count - 1 else 3 + i % 5),
            _say(i + 2, 3),
        )
        question: dict = {"role": "user", "content": asked}
        if row["images"] == "yes" and i % 3 < 2:  # a rank whose rows have none
            picture(i, 40 + 10 * i).save(folder / f"{i}.png")
            question["content"] = [{"type": "image", "path": f"{i}.png"}, {"type": "text", "text": asked}]
        answered, wrong = ({"role": "assistant", "content": each} for each in (answer, other))
        if row["objective"] in ("dpo", "orpo", "simpo", "cpo"):
            plain = {"prompt": asked, "chosen": f" {answer}", "rejected": f" {other}"}
            chat = {"prompt": [question], "chosen": [answered], "rejected": [wrong]}
        elif row["objective"] == "kto":
            plain = {"prompt": asked, "completion": f" {answer}", "label": i % 2 == 0}
            chat = {"prompt": [question], "completion": [answered], "label": i % 2 == 0}
        elif row["objective"] == "reward":
            plain = {"chosen": f"{asked} {answer}", "rejected": f"{asked} {other}"}
            chat = {"prompt": [question], "chosen": [answered], "rejected": [wrong], "margin": 0.5}
        elif row["objective"] == "classify":
            label = {
                "one": "abc"[i % 3],
                "several": [["a"], [], ["a", "b"], ["c"]][i % 4],
                "numbers": [i % 5 - 1.5, 0.25 * (i % 3)],
            }[row["labels"]]
            plain = {"text": f"{asked} {answer}", "label": label}
            chat = {"messages": [question, answered], "label": label}
        elif row["objective"] == "embed":
            plain = chat = {"anchor": asked, "positive": answer, "negative": [other] * (i % 3)}
        else:
            plain = {"prompt": asked, "completion": f" {answer}"}
            again = [{"role": "user", "content": _say(i + 3, 2)}, {"role": "assistant", "content": _say(i + 4, 3)}]
            chat = {"messages": [question, answered, *(again if i % 3 == 0 and row["family"] != "gemma3" else [])]}
        ids = [3 + (i * 5 + j * 11) % 250 for j in range(5 + i % 4)]
        made.append(
            {
                "completion": plain,
                "text": {"text": f"{asked} {answer}"},
                "ids": {"input_ids": [*ids, 2], "labels": [-100, -100, *ids[2:], 2]},
            }.get(row["data"], chat)
        )
    return made


def _targets(sample: dict, train_on: str, tokenizer) -> tuple[list[int], list[bool]]:
    """The ids of a row and which of them are learned, written down without the kit."""
    if "input_ids" in sample:
        return sample["input_ids"], [label != -100 for label in sample["labels"]]
    if "text" in sample:
        parts = [(sample["text"] + tokenizer.eos_token, True)]
    elif "completion" in sample:
        parts = [(sample["prompt"], False), (sample["completion"] + tokenizer.eos_token, True)]
    else:
        parts = []
        for i, message in enumerate(sample["messages"]):
            of_model = message["role"] == "assistant"
            learned = of_model and (train_on == "assistant" or i == len(sample["messages"]) - 1)
            parts.append((f"<|im_start|>{message['role']}\n", train_on == "all"))
            parts.append((f"{message['content']}<|im_end|>", learned or train_on == "all"))
            parts.append(("\n", train_on == "all"))
    bos = tokenizer.bos_token_id  # before a plain text, if there is one; a template writes its own
    begin = [] if "messages" in sample or bos is None else [bos]
    pieces = [(tokenizer(text, add_special_tokens=False)["input_ids"], learned) for text, learned in parts]
    pieces.insert(0, (begin, False))
    return [i for ids, _ in pieces for i in ids], [learned for ids, learned in pieces for _ in ids]


def _plain_loss(model, samples: list[dict], row: dict[str, str], tokenizer, folder: Path) -> float:
    """The loss of a model of transformers or peft, each sample alone, written down without the kit."""
    if row["objective"] == "embed":
        return _contrastive_loss(model, samples, row["pooling"], tokenizer)
    if row["objective"] == "reward":
        return sum(_pair_loss(model, sample, tokenizer) for sample in samples) / len(samples)
    if row["objective"] == "classify":
        return sum(_label_loss(model, sample, row["labels"], tokenizer) for sample in samples) / len(samples)
    total, count = 0.0, 0
    for sample in samples:
        inputs, learned = _inputs(sample, row, tokenizer, folder)
        chosen, wanted = torch.tensor(learned[1:]), inputs["input_ids"][0, 1:]
        scores = _logits(model, inputs)[0, :-1].log_softmax(-1)
        losses = torch.nn.functional.nll_loss(scores, wanted, reduction="none")
        total, count = total + losses[chosen].sum().item(), count + int(chosen.sum())
    return total / count


@torch.no_grad()
def _logits(model, inputs) -> torch.Tensor:
    return model(**inputs).logits.double()


def _inputs(sample: dict, row: dict[str, str], tokenizer, folder: Path) -> tuple[dict, list[bool]]:
    """What a model reads of a row, and which tokens are learned. Images come from the family's own processor."""
    if row["family"] != "gemma3" or "messages" not in sample:
        ids, learned = _targets(sample, row["train_on"], getattr(tokenizer, "tokenizer", tokenizer))
        return {"input_ids": torch.tensor([ids])}, learned
    asked, _ = sample["messages"]
    pictures = []
    if isinstance(asked["content"], list):
        pictures = [Image.open(folder / part["path"]) for part in asked["content"] if part["type"] == "image"]
    render = tokenizer.tokenizer.apply_chat_template
    given = {"images": [pictures]} if pictures else {}
    asked = render([asked], tokenize=False, add_generation_prompt=True)
    whole = render(sample["messages"], tokenize=False)
    inputs = tokenizer(text=[whole], return_tensors="pt", add_special_tokens=False, **given)
    start = len(tokenizer(text=[asked], add_special_tokens=False, **given)["input_ids"][0])
    return dict(inputs), [i >= start for i in range(inputs["input_ids"].shape[1])]


def _ids(text, tokenizer) -> list[int]:
    """Of a conversation as its template writes it, or of a text as the tokenizer reads it."""
    if isinstance(text, str):
        return tokenizer(text)["input_ids"]
    return tokenizer(tokenizer.apply_chat_template(text, tokenize=False), add_special_tokens=False)["input_ids"]


def _pair_loss(model, sample: dict, tokenizer) -> float:
    texts = [sample[name] for name in ("chosen", "rejected")]
    if "prompt" in sample:
        texts = [sample["prompt"] + text for text in texts]
    better, worse = (_logits(model, {"input_ids": torch.tensor([_ids(text, tokenizer)])})[0, 0] for text in texts)
    return -torch.nn.functional.logsigmoid(better - worse - sample.get("margin", 0)).item()


def _label_loss(model, sample: dict, labels: str, tokenizer) -> float:
    ids = _ids(sample["text"] if "text" in sample else sample["messages"], tokenizer)
    scores = _logits(model, {"input_ids": torch.tensor([ids])})[0]
    if labels == "numbers":
        assert model.config.problem_type in ("regression", None)  # None: an adapter's base does not hold it
        return torch.nn.functional.mse_loss(scores, torch.tensor(sample["label"]).to(scores)).item()
    if labels == "one":
        return -scores.log_softmax(0)["abc".index(sample["label"])].item()
    wanted = torch.tensor([float(name in sample["label"]) for name in "abc"]).to(scores)
    return torch.nn.functional.binary_cross_entropy_with_logits(scores, wanted).item()


@torch.no_grad()
def _contrastive_loss(model, samples: list[dict], pooling: str, tokenizer) -> float:
    def embed(texts):
        states = [model(input_ids=torch.tensor([_ids(each, tokenizer)])).last_hidden_state[0] for each in texts]
        pooled = [each.mean(0) if pooling == "mean" else each[-1] for each in states]
        return torch.nn.functional.normalize(torch.stack(pooled).double(), dim=1)

    documents = [each["positive"] for each in samples] + [text for each in samples for text in each["negative"]]
    scores = embed([each["anchor"] for each in samples]) @ embed(documents).T / 0.05
    for i, sample in enumerate(samples):  # neither its own text nor another copy of its positive is a negative
        own = (sample["anchor"], sample["positive"])
        scores[i, [k for k, text in enumerate(documents) if text in own and k != i]] = -torch.inf
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(samples))).item()


# What of a line of metrics is not the same on every machine.
OF_MACHINE = ("seconds", "bytes", "per_second", "share", "grad_norm")


def measures(row: dict) -> list[str]:
    return [key for key, value in row.items() if isinstance(value, float) and not key.endswith(OF_MACHINE)]


class Way:
    """One row on its way."""

    def __init__(self, row: dict[str, str], folder: Path, models: Path, fp32: dict[str, str]) -> None:
        self.row, self.folder, self.fp32 = row, folder, fp32
        self.is_adapter = row["method"] not in ("full", "frozen")
        self.in_float32 = row["precision"] == "no"
        self.base = _model(models, row["family"], row["tied"] == "yes", row["stored"])
        self.samples = _rows(row, 12, folder, longest=60)
        self.evaluated = _rows(row, 5, folder)
        # Rounding grows in a step of muon or lion, which do not follow the size of a gradient.
        self.bound = 1e-4 if row["optim"] in ("muon", "lion_32bit") else 2e-6
        self.flags = self._flags()

    def _config(self, name: str) -> str:
        """The shipped Accelerate config, with the row's precision."""
        if self.row["precision"] == "bf16":
            return name
        path = self.folder / f"{name}.yaml"
        path.write_text(Path(self.fp32[name]).read_text().replace('"no"  #', f'"{self.row["precision"]}"  #'))
        return str(path)

    def _write(self, name: str, rows: list[dict]) -> Path:
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        return path

    def _flags(self) -> dict[str, object]:
        row = self.row
        linear, head, embedding = MODULES.get(row["family"], LLAMA_MODULES)
        flags: dict[str, object] = {
            "model_name_or_path": self.base,
            "method": {"full": "full", "frozen": "full", "qlora": "qlora"}.get(row["method"], "lora"),
            "dataset": self._write("train", self.samples),
            "eval_dataset": self._write("eval", self.evaluated),
            "max_length": 64,
            "excess_length_strategy": row["long"],
            "objective": row["objective"],
            "optim": row["optim"],
            "learning_rate": 1e-3 if row["optim"].startswith(("lion", "muon")) else 5e-3,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "global_batch_size": 4,
            "per_device_train_batch_size": row["micro"],
            "max_steps": 3,
            "save_steps": 1,
            "save_total_limit": 0,
            "eval_on_start": True,
        }
        if row["objective"] == "grpo":
            own = self.folder / "own.py"  # two answers of a random model are hardly worth the same
            own.write_text("def letters(expected, answer, row):\n    return sum(map(ord, answer)) % 97 / 97\n")
            flags |= {"rewards": f"{own}:letters,overlong:4", "reward_weights": "1,0.5", "num_generations": 2}
            flags |= {"policy_loss": row["policy"], "num_iterations": row["iterations"], "max_new_tokens": 8}
            flags |= {"max_steps": 3, "beta": 0.1, "kl_estimator": row["kl"]} if row["kl"] != "0" else {}
            if row["optim"] != "muon":
                flags["learning_rate"] = 2e-2  # two answers to a prompt teach less than an answer of the data
            if row["sampling"] == "cut":
                flags |= {"rollout_temperature": 1.2, "rollout_top_p": 0.95, "rollout_top_k": 50}
            flags |= {"dynamic_sampling": True} if row["groups"] == "dynamic" else {}
            flags |= {"metric_for_best_model": "eval_loss"} if row["keep"] == "best" else {}
        if row["objective"] == "distil" and row["teacher"] != "none":
            flags |= {"teacher": _teacher(self.base)}
        if row["objective"] in ("reward", "classify", "embed"):
            flags |= {"chat_template": None}
        if row["family"] == "mixtral":
            flags["router_aux_loss_coef"] = 0
        if row["data"] == "mixture":
            entries = [{"path": str(self._write("other", self.samples[::-1])), "weight": 1, "name": "other"}]
            flags["dataset"] = json.dumps([{"path": str(flags["dataset"]), "weight": 2}, *entries])
        given = {
            "method": {
                "frozen": {"train_only": f"{LAYERS.get(row['family'], 'model.layers')}.1.*"},
                "dora": {"use_dora": True},
                "rslora": {"use_rslora": True},
                "oft": {"adapter_type": "oft", "adapter_options": "oft_block_size=8"},
            },
            "dropout": {"0.1": {"lora_dropout": 0.1}},
            "targets": {
                "some": {"lora_target_modules": linear},
                "head": {"lora_target_modules": f"{linear},{head}"},
                "experts": {"lora_target_modules": "all-linear,experts.gate_up_proj,experts.down_proj"},
            },
            "whole": {"head": {"lora_modules_to_save": head}, "embedding": {"lora_modules_to_save": embedding}},
            "tokens": {"new": {"new_tokens": "<|sep|>,<|and|>"}, "trained": {"trainable_tokens": "<|im_end|>"}},
            "packing": {"yes": {"packing": True}},
            "streaming": {"yes": {"streaming": True, "shuffle_buffer_size": 4}},
            "train_on": {each: {"train_on": each} for each in ("last", "all")},
            "extra": {
                "neftune": {"neftune_noise_alpha": 5},
                "smoothing": {"label_smoothing_factor": 0.1},
                "z_loss": {"z_loss_coef": 1e-3},
                "loraplus": {"loraplus_lr_ratio": 4},
                "router": {"router_aux_loss_coef": 0.1},
            },
            "checkpointing": {
                "yes": {"gradient_checkpointing": True},
                "selective": {"gradient_checkpointing": "selective"},
            },
            "compile": {"yes": {"torch_compile": True}},
            "teacher": {"stored": {"teacher_top_k": 16}},
            "pooling": {"mean": {"pooling": "mean"}},
            "labels": {"numbers": {"problem_type": "regression"}},
            "sequence": {"parallel": {"sequence_parallel_size": 2}},
            "tiles": {"yes": {"tiled_mlp": True}},
            "keep": {"best": {"keep_best": True, "eval_steps": 1}},
            "answers": {
                "generated": {"predict_with_generate": True, "max_new_tokens": 8 if row["objective"] == "grpo" else 4}
            },
        }
        for factor, values in given.items():
            flags |= values.get(row.get(factor, ""), {})
        return flags

    def start(self, name: str, topology: str = "", prepare=None, **changes):
        config = topology or self.row["topology"]
        path = self._config(config)
        run = Finetune(self.base, self.folder / "train.jsonl", self.folder)
        flags = {**self.flags, "config": path, **changes}
        run.defaults = {name: value for name, value in flags.items() if value is not None}
        if flags.get("tiled_mlp"):
            prepare = functools.partial(small_tiles, prepare)
        if self.row["precision"] == "fp16":  # three steps might all overflow with the usual scale
            prepare = functools.partial(from_scale, 2.0**8, prepare)
        if config == "single":
            run.defaults.pop("sequence_parallel_size", None)
        return run(name, 1 if config == "single" else 2, prepare=prepare)

    # --- the stations, in their order

    def travel(self) -> None:
        run = self.start("run")
        if self.row["compile"] == "yes" and "torch_compile: the compiler failed" in run.output:
            assert run.status == 2 and "--torch_compile false" in run.output
            return
        assert run.status == 0, run.output
        assert len(run.losses) == 3 and all(map(torch.isfinite, torch.tensor([float.fromhex(x) for x in run.losses])))
        assert (run.folder / "report.html").stat().st_size > 10_000
        if self.row["answers"] == "generated":
            asks = self.row["train_on"] != "all" or self.row["data"] not in ("messages", "mixture")
            assert ("eval_exact_match" in run.rows[-1]) == asks, run.output
            assert ("have no prompt" in run.output) != asks, run.output
        self.check_resume(run)
        if self.in_float32 and self.row["dropout"] == "0":
            self.check_topology(run)
            self.check_packs(run)
        self.check_final(run)
        self.check_score(run)
        self.check_export(run)
        if self.row["chat"] == "yes":
            self.check_chat(run)

    def check_resume(self, run) -> None:
        """Continued after the second step, by its checkpoint or by a signal: the same bits."""
        if self.row["stop"] == "signal":
            stopped = self.start("again", prepare=functools.partial(signal_in_step, 1, signal.SIGTERM, None))
            assert stopped.status == 75, stopped.output
        else:
            shutil.copytree(run.folder, self.folder / "again")
            shutil.rmtree(self.folder / "again/final")
            shutil.rmtree(self.folder / "again/checkpoints/step-00000003")
        again = self.start("again")
        assert again.status == 0, again.output
        assert re.search("continuing after step [12] of 3", again.output), again.output
        assert again.losses == run.losses, "resume: losses"
        for path in (run.folder / "final").glob("*.safetensors"):
            assert path.read_bytes() == (self.folder / "again/final" / path.name).read_bytes(), "resume: weights"

    def check_topology(self, run) -> None:
        """On one process, and in other micro-batches: the same norms, losses, metrics and evaluations."""
        if self.row["extra"] == "router":  # means over the tokens of a micro-batch: docs/models.md
            return
        one = self.start("one", "single", per_device_train_batch_size=4)
        assert one.status == 0, one.output
        runs = [run]
        if self.row["sequence"] == "parallel":  # whose processes have all samples
            runs.append(self.start("whole", sequence_parallel_size=None))
        for each in runs:
            self.check_measures(each, one)

    def check_measures(self, run, one) -> None:
        assert run.status == 0, run.output
        assert run.grad_norms == pytest.approx(one.grad_norms, rel=10 * self.bound), "topology: norms"
        for ours, theirs in zip(run.rows, one.rows, strict=True):
            for key in measures(theirs):
                # Rewards, divergences and losses of grpo are differences of what is a hundred times as large.
                is_sum = key == "loss" and self.row["objective"] != "grpo"
                near = pytest.approx(theirs[key], rel=5 * self.bound, abs=0 if is_sum else 20 * self.bound)
                assert ours[key] == near, f"topology: {key} of step {theirs['step']}"

    def check_packs(self, run) -> None:
        """All samples in each step, in packs and without: the same losses."""
        if self.row["packing"] == "no" or self.row["streaming"] == "yes" or self.row["data"] == "mixture":
            return
        if self.row["objective"] == "grpo":
            loose = self.start("loose", packing=False)
            first = [next(row["loss"] for row in each.rows if "loss" in row) for each in (loose, run)]
            assert first[0] == pytest.approx(first[1], rel=5e-6, abs=1e-6), "packs: losses"
            return
        if self.row["extra"] in ("neftune", "router"):  # noise follows the place in the row, the other the micro-batch
            return
        losses = {}
        for packing, pattern in ((True, r"packing: (\d+) packs"), (False, r"training data: (\d+) samples")):
            batch = int(re.search(pattern, run.output)[1])
            sizes = {"global_batch_size": batch, "per_device_train_batch_size": 1 if packing else batch}
            whole = self.start(f"packing-{packing}", "single", packing=packing, **sizes, save_steps=0)
            assert whole.status == 0, whole.output
            losses[packing] = [row["loss"] for row in whole.rows if "loss" in row]
        # A divergence near 0 is a difference of larger numbers.
        wanted = pytest.approx(losses[False], rel=max(5e-6, self.bound), abs=1e-7)
        assert losses[True] == wanted, f"packs: {losses}"

    def check_final(self, run) -> None:
        """What ``final/`` holds, opened by the libraries alone, has the loss that the run has measured."""
        opener = AutoProcessor if self.row["family"] == "gemma3" else AutoTokenizer
        self.tokenizer = opener.from_pretrained(run.folder / "final")
        measured = [row["eval_loss"] for row in run.rows if "eval_loss" in row]
        self.final = self._opened(run.folder / "final", in_4bit=self.row["method"] == "qlora")
        if self.row["objective"] in ("dpo", "orpo", "simpo", "cpo", "kto"):
            return
        if self.row["method"] == "qlora" and self.row["family"] == "gemma3":
            return  # bitsandbytes' kernel for CPUs does not take layers so small, outside the kit
        is_rounded = self.row["precision"] != "no" or self.row["stored"] != "float32" or self.row["method"] == "qlora"
        bound = 3e-2 if is_rounded else 2e-6
        models = {"final": (self.final, measured[-1], bound)}
        if self.row["tokens"] != "new" and self.row["objective"] not in ("reward", "classify"):  # whose head is new
            bound_of_base = 0.1 if self.row["method"] == "qlora" else bound
            models["base"] = (
                self._kind().from_pretrained(self.base, dtype=torch.float32).eval(),
                measured[0],
                bound_of_base,
            )
        for name, (model, loss, near) in models.items():
            found = _plain_loss(model, self.evaluated, self.row, self.tokenizer, self.folder)
            assert found == pytest.approx(loss, rel=near), f"{name}: loss {found}, measured {loss}"

    def _kind(self):
        """The class of transformers that opens the model."""
        if self.row["objective"] in ("reward", "classify"):
            return transformers.AutoModelForSequenceClassification
        if self.row["objective"] == "embed":
            return transformers.AutoModel
        if self.row["family"] == "gemma3":
            return transformers.AutoModelForImageTextToText
        return AutoModelForCausalLM

    def _opened(self, folder: Path, in_4bit: bool = False):
        """A model of the run, or its adapter on the base, as the libraries alone open it."""
        from peft import AutoPeftModelForCausalLM, PeftModel

        if not (folder / "adapter_config.json").exists():
            return self._kind().from_pretrained(folder, dtype=torch.float32).eval()
        options = {}
        if in_4bit:
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.float32,
            )
        if self._kind() is AutoModelForCausalLM:
            return AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
        num_labels = {
            "classify": {"num_labels": 2 if self.row["labels"] == "numbers" else 3},
            "reward": {"num_labels": 1},
        }
        num_labels = num_labels.get(self.row["objective"], {})
        base = self._kind().from_pretrained(self.base, dtype=torch.float32, **num_labels, **options)
        return PeftModel.from_pretrained(base, folder).eval()

    def check_score(self, run) -> None:
        """``recipes/score.py`` of the run's final model: the loss of the run's last evaluation."""
        measured = [row["eval_loss"] for row in run.rows if "eval_loss" in row][-1]
        words = ["score", str(run.folder), str(self.flags["eval_dataset"]), "--config", self._config("single")]
        done = typed("-m", "kit.cli.main", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        is_rounded = self.row["precision"] != "no" or (self.row["stored"] != "float32" and not self.is_adapter)
        assert json.loads(done.stdout.splitlines()[-1])["eval_loss"] == pytest.approx(
            measured, rel=3e-2 if is_rounded else 2e-6
        ), "score: loss"

    def check_export(self, run) -> None:
        """An adapter is merged, and the merged model is the adapter's; a full checkpoint becomes ``final/`` again."""
        from safetensors.torch import load_file

        source = run.folder / ("final" if self.is_adapter else "checkpoints/step-00000003")
        to = "float32" if self.row["objective"] == "grpo" else self.row["dtype"]  # some of its adapters hardly move
        dtype = [] if to == "default" or not self.is_adapter else ["--dtype", to]
        words = ["recipes/export.py", str(source), "--output_dir", str(self.folder / "exported"), *dtype]
        done = typed(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        if not self.is_adapter:
            old, new = (
                load_file(folder / "model.safetensors") for folder in (run.folder / "final", self.folder / "exported")
            )
            assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old), (
                "export: weights"
            )
            return
        merged = self._opened(self.folder / "exported")
        adapter = self.final
        if self.row["method"] == "qlora":  # merged into what was quantised, not into the rounded weights
            adapter = self._opened(run.folder / "final")
        tokenizer = getattr(self.tokenizer, "tokenizer", self.tokenizer)
        text = tokenizer(_say(1, 12), return_tensors="pt", add_special_tokens=False)["input_ids"]  # [1, T]

        def outputs(model):
            out = model(input_ids=text)
            return (
                out.last_hidden_state
                if self.row["objective"] == "embed"
                else (out.logits.log_softmax(-1) if out.logits.dim() == 3 else out.logits)
            )

        with torch.no_grad():
            wanted, found = outputs(adapter), outputs(merged)
            with adapter.disable_adapter():
                moved = (outputs(adapter) - wanted).abs().mean().item()
        difference = (found - wanted).abs().mean().item()
        bound = 1e-5 if to == "float32" else max(5e-3, moved / 3)
        assert difference < bound, f"merge: {difference:.2g} off; the adapter moved its base by {moved:.2g}"

    def check_chat(self, run) -> None:
        done = typed("-m", "kit.cli.main", "chat", str(run.folder), "--max_new_tokens", "4", text="red green\n")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stderr


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


_MARKS = [(), (pytest.mark.long,), (pytest.mark.release,)]  # the first 10 in CI, the first 32 in the long tier


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=_MARKS[(i >= 10) + (i >= 32)], id=name_of(row)) for i, row in enumerate(ROWS)],
)
def test_a_row_of_options_is_right_at_each_station(row, tmp_path, models, fp32):
    Way(row, tmp_path, models, fp32).travel()


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=_MARKS[(i >= 2) + (i >= 8)], id=name_of(row)) for i, row in enumerate(OF_ROLLOUTS)],
)
def test_a_row_of_options_of_rollouts_is_right_at_each_station(row, tmp_path, models, fp32):
    Way(row, tmp_path, models, fp32).travel()


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=_MARKS[(i >= 4) + (i >= 12)], id=name_of(row)) for i, row in enumerate(OF_TASKS)],
)
def test_a_row_of_options_of_tasks_is_right_at_each_station(row, tmp_path, models, fp32):
    Way(row, tmp_path, models, fp32).travel()


@pytest.mark.long
@pytest.mark.parametrize(("rule", "words"), REFUSED, ids=lambda each: name_of(each) if isinstance(each, dict) else "")
def test_what_cannot_go_together_is_refused_in_words(rule, words, tmp_path, models, fp32):
    """Each value of a rule, beside the plainest others, before any weight is read."""
    of_objective = ROLLOUTS if rule.get("objective") == "grpo" else {}
    plain = {factor: values[0] for factor, values in (FACTORS | of_objective).items()} | {"method": "lora"}
    for number, values in enumerate(product(*(each.split("|") for each in rule.values()))):
        folder = tmp_path / str(number)
        folder.mkdir()
        row = plain | dict(zip(rule, values, strict=True))
        run = Way(row, folder, models, fp32).start("run")
        assert run.status == 2 and re.search(words, run.output) and "Traceback" not in run.output, (row, run.output)
        assert not (run.folder / "checkpoints").exists()

"""Sequence-classification, reward and embedding heads.

Promises: a classifier or reward model is transformers' ``AutoModelForSequenceClassification``, whose linear head
``score`` reads the hidden state of the last token; an embedding model is ``AutoModel``. ``architectures`` of the
config says which it is, so what a run has written is opened again as it was trained.
"""

import inspect
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from transformers import AutoModel, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.utils import cached_file, logging

from kit.config.settings.objective import ObjectiveSettings
from kit.system.durable import read_small
from kit.system.errors import Problem, UserError, listed
from kit.tasks.spec import Head

SCORE = "score"  # the name of the head
TASKS = {"lm": "CAUSAL_LM", "scores": "SEQ_CLS", "embedding": "FEATURE_EXTRACTION"}  # as peft names them
_POOLED = {"mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken"}  # as sentence-transformers has it
_CLASSES: dict[Head, Any] = {"scores": AutoModelForSequenceClassification, "embedding": AutoModel}
_SCORES = set(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values())
_LM = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}
_EMBEDDING = {name for name in MODEL_MAPPING_NAMES.values() if isinstance(name, str) and name not in _LM}


def head_of(config: Any) -> Head:
    """Return what a model of ``config`` computes."""
    named = set(config.architectures or ())
    return "scores" if named & _SCORES else "embedding" if named & _EMBEDDING else "lm"


def class_of_head(config: Any) -> Any:
    """Return the auto class that opens a model with a classification or embedding head; None for any other."""
    return _CLASSES.get(head_of(config))


def with_head(config: Any, settings: ObjectiveSettings, name: str, max_length: int) -> Any:
    """Return ``config`` of a model with the head that the objective trains. A head that is there already stays.

    Args:
        name: of the model, for messages.
        max_length: tokens of a text at most.

    Raises:
        UserError: the family has no such head, or the model has another one.
    """
    wanted, own = settings.declared.head, head_of(config)
    if wanted == own == "lm":
        return config
    if own not in (wanted, "lm"):
        found = f"{name} is a {config.architectures[0]}, and objective {settings.objective} trains {wanted}"
        fix = "--objective reward or classify continues a classification head, embed an embedding model"
        raise UserError("model_name_or_path", found, fix=fix)
    made = _CLASSES[wanted]._model_mapping.get(type(config), None)
    if made is None or config.get_text_config() is not config:
        expected = "a text-only model of a family for which transformers has such a head"
        found = f"{name} is a {config.model_type}, for which transformers has no head for {wanted}"
        raise UserError("model_name_or_path", found, expected)
    config.architectures = [made.__name__]
    if wanted == "embedding":
        if long := [size for size in settings.matryoshka_dims if size > config.hidden_size]:
            found = f"{long[0]}, but embeddings of {name} have {config.hidden_size} components"
            raise UserError("matryoshka_dims", found, f"at most {config.hidden_size}")
        # For ``write_sentence_transformers``, whenever it is written.
        config.sentence_transformers = {"pooling": settings.pooling, "max_length": max_length}
    labels = settings.scores
    if wanted == "scores" and (own == "lm" or labels):
        if own == wanted and config.num_labels != len(labels):
            found = f"the classification head of {name} has {config.num_labels} labels, the recipe {len(labels)}"
            raise UserError("labels", found, fix="a model without a classification head")
        config.tie_word_embeddings = False  # no head is left that could be tied
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: i for i, label in enumerate(labels)}
        config.problem_type = settings.problem_type
    return config


def labels_of(config: Any) -> list[str]:
    """Return the label names of a classifier; empty if it has no names of its own.

    Raises ``UserError`` if a number has no name, or not one of its own.
    """
    names = [str(config.id2label.get(i, "")) for i in range(config.num_labels)]
    if "" in names or len(set(names)) < len(names):
        expected = f"a name for each number from 0 to {len(names) - 1}, no name twice"
        raise UserError("model_name_or_path", f"config.json has id2label {config.id2label}"[:200], expected)
    return [] if names == [f"LABEL_{i}" for i in range(len(names))] else names


def show_head(model: Any) -> None:
    """Let ``get_output_embeddings`` of a classifier return its head, as that of other models does."""
    if head_of(model.config) == "scores" and hasattr(model, SCORE):
        model.get_output_embeddings = MethodType(lambda self: getattr(self, SCORE), model)


@contextmanager
def silent_about_head(config: Any) -> Iterator[None]:
    """In the ``with`` block, let transformers not warn that a new head is new, and the language-model head unused."""
    before = logging.get_verbosity()
    if head_of(config) != "lm":
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def draw_head(model: Any, missing: list[str], seed: int) -> list[str]:
    """Initialise a new head, the same on every rank. Returns the missing weights that are not its own.

    Args:
        missing: names of the weights that the files lack.
    """
    if head_of(model.config) != "scores" or f"{SCORE}.weight" not in missing:
        return missing
    weight = getattr(model, SCORE).weight
    deviation = getattr(model.config, "initializer_range", 0.02)
    drawn = torch.empty(weight.shape).normal_(0, deviation, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        weight.copy_(drawn)
    names = listed([*model.config.id2label.values()], 10)
    model.new_head = (
        f"note: the classification head ({len(weight)} labels: {names}) is new, initialised with seed {seed}"
    )
    return [name for name in missing if name != f"{SCORE}.weight"]


def check_head(meta_model: Any) -> Iterator[Problem]:
    """Return a problem if the family classifies by something else than the last token's state, or has dropout."""
    head = head_of(meta_model.config)
    name = type(meta_model).__name__

    source = inspect.getsource(type(meta_model).forward) if head == "scores" else ""
    if head == "scores" and ("pooled_logits = logits[" not in source or not hasattr(meta_model, SCORE)):
        found = f"{name}, which is not known to classify by the last token"
        yield Problem("model_name_or_path", found, "a family like Llama, Qwen, Gemma or Mistral")
    if head == "embedding":
        drops = [
            f"{key} {value}"
            for key, value in vars(meta_model.config).items()
            if value and ("dropout" in key or key.endswith("_pdrop"))
            if not key.startswith(("summary_", "classifier_"))  # of heads, which an embedding model lacks
        ]
        if drops:
            found = f"{name} has {listed(drops)}: dropout would make the two GradCache passes differ"
            yield Problem("model_name_or_path", found, fix="write 0 there in its config.json")


def template_beside(head: Head, template: Any, text_form: str) -> Any:
    """Return the chat template to save with a model; None for a head on plain texts.

    sentence-transformers would make chats of those.
    """
    return template if text_form == "chat" or head == "lm" else None


def pad_with(tokenizer: Any, last_ids: set[int]) -> None:
    """Let ``tokenizer`` pad with a token that ends no text: transformers takes the last one that is no padding.

    Args:
        last_ids: the tokens that end texts.

    Raises:
        UserError: each token that could be taken ends texts.
    """
    for token in (tokenizer.pad_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.bos_token):
        if token is not None and tokenizer.convert_tokens_to_ids(token) not in last_ids:
            tokenizer.pad_token = token
            return
    found = "no pad token available: every special token also ends a text"
    raise UserError("model_name_or_path", found, "a tokenizer with a pad_token")


def read_pooling(name: str, revision: str | None) -> str | None:
    """Return the tokens that a model or an adapter pools, as ``write_sentence_transformers`` wrote it; None if unknown.

    Args:
        name: a folder, or a hub id.
    """
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        options: Any = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
        file = cached_file(os.path.expanduser(name), "1_Pooling/config.json", **options)
        read = json.loads(read_small(file)) if file else {}
        return next((kind for kind, key in _POOLED.items() if read.get(key)), None)
    return None


def write_sentence_transformers(folder: Path, hidden_size: int, pooling: str, max_length: int) -> None:
    """Write what sentence-transformers needs next to a model: the tokens that it pools, and that it normalises."""
    kinds = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Normalize", "Normalize")]
    modules = [
        {"idx": int(i), "name": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, path, kind in kinds
    ]
    files: dict[str, Any] = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
        "config_sentence_transformers.json": {"similarity_fn_name": "cosine", "prompts": {}},
        "1_Pooling/config.json": {
            "word_embedding_dimension": hidden_size,
            **{key: pooling == kind for kind, key in _POOLED.items()},
        },
    }
    (folder / "2_Normalize").mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")

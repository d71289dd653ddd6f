"""Embedding and lm_head rows of new tokens, and rows that train while the rest is frozen.

Promises:

- A new row starts as the mean of the rows of all earlier tokens, without noise: the same on every rank and at every
  start. A vocabulary that is padded gives its free rows first.
- With adapters, the rows of ``new_tokens`` and ``trainable_tokens`` train and are saved, in the embedding and, where it
  is not tied, in the head. Modules of ``lora_modules_to_save`` are fully fine-tuned. Both are peft's own mechanisms, so
  plain peft opens the result.
"""

from collections.abc import Iterator
from typing import Any

import torch

from kit.config.adapter_base import adapter_config
from kit.config.expressions import matches, matches_any
from kit.config.settings.method import MethodSettings
from kit.model.adapters.targets import last_part
from kit.model.pretrained.locate import open_adapter
from kit.model.pretrained.tokenizer import ids_of, open_tokenizer
from kit.system.errors import Problem, UserError, did_you_mean

_ROWS = "--trainable_tokens or --new_tokens, whose rows stay tied"


def num_rows(model: Any) -> int:
    """Return the number of rows of the embedding: the vocabulary of the model."""
    return model.get_input_embeddings().weight.shape[0]


def add_rows(model: Any, settings: MethodSettings) -> None:
    """Give ``model`` a row for each new token of ``settings``, or for each token of an adapter that trained some rows.

    ``model`` may be on meta. Its config then has the new number of rows too.

    Raises:
        UserError: as ``open_tokenizer``.
    """
    if settings.new_tokens:
        ids = ids_of(open_tokenizer(settings), settings.new_tokens)
    elif settings.adapter_name_or_path and _trains_rows(settings.adapter_name_or_path):
        # As AutoPeftModel does. All rows that are added come from the adapter.
        ids = list(range(num_rows(model), len(open_tokenizer(settings))))
    else:
        return
    if not ids:
        return
    if max(ids) >= num_rows(model):
        model.resize_token_embeddings(max(ids) + 1, mean_resizing=False)
    head = model.get_output_embeddings()
    for table in (model.get_input_embeddings().weight, head.weight, getattr(head, "bias", None)):
        if table is not None:  # tied ones are done twice, with the same result
            with torch.no_grad():
                table[ids] = table[: min(ids)].mean(0, dtype=torch.float32).to(table.dtype)


def _trains_rows(adapter: str) -> bool:
    try:
        config = adapter_config(str(open_adapter(adapter)))
    except UserError:  # ``check_adapter`` reports it
        return False
    return bool(config.get("trainable_token_indices") or config.get("modules_to_save"))


def rows_and_modules_options(model: Any, settings: MethodSettings) -> dict[str, Any]:
    """Return the arguments of ``LoraConfig`` for token rows and ``modules_to_save``."""
    whole = [each for name in settings.lora_modules_to_save or [] for each in _names_for_peft(model, name)]
    options: dict[str, Any] = {}
    tables = _table_names(model)
    if whole:
        options["modules_to_save"] = whole
        options["ensure_weight_tying"] = len(tables) == 1 and matches_any(tables[0], whole)
    tokens = [*(settings.new_tokens or []), *(settings.trainable_tokens or [])]
    tables_with_rows = [table for table in tables if not matches_any(table, whole)]
    if tokens and tables_with_rows:
        ids = sorted(set(ids_of(open_tokenizer(settings), tokens)))
        options["trainable_token_indices"] = {table: ids for table in tables_with_rows}
    return options


def check_rows_and_modules(settings: MethodSettings, meta_model: Any) -> Iterator[Problem]:
    """Check ``lora_modules_to_save``, and whether single rows of this model can train."""
    targets, head = settings.lora_target_modules, meta_model.get_output_embeddings()
    modules = dict(meta_model.named_modules())
    if isinstance(targets, list):
        adapted = {name for name in modules if matches_any(name, targets)}
    else:
        adapted = {name for name, each in modules.items() if isinstance(each, torch.nn.Linear) and each is not head}
    yield from _check_whole_modules(settings, meta_model, modules, adapted)
    yield from _check_rows(settings, meta_model, adapted)


def _check_whole_modules(
    settings: MethodSettings, model: Any, modules: dict[str, Any], adapted: set[str]
) -> Iterator[Problem]:
    field = "lora_modules_to_save"

    whole = settings.lora_modules_to_save or []
    owners = {name for name, module in modules.items() if next(module.parameters(recurse=False), None) is not None}
    choices = {last_part(name) for name in owners - adapted}
    expected = f"some of {', '.join(sorted(choices))}"
    for name in whole:
        named = {full for full in modules if matches(full, name)}
        if not named:
            yield Problem(field, f"no module {name!r}", expected, did_you_mean(name, choices))
        elif not named <= owners - adapted:
            yield Problem(field, f"{name!r} gets an adapter, or holds modules that do", expected)
    tables = _table_names(model)
    head = model.get_output_embeddings()
    names_head = any(module is head and matches_any(full, whole) for full, module in modules.items())
    names_table = matches_any(tables[0], whole)
    flag = flag_of_whole_tables(model)
    if len(tables) == 1 and (names_head or names_table) and not (flag and names_table):
        found = f"{tables[0]} and the output head are tied here, and peft would train only one of them"
        yield Problem(field, found, fix=flag or f"--method full; or {_ROWS}")


def _check_rows(settings: MethodSettings, model: Any, adapted: set[str]) -> Iterator[Problem]:
    if not settings.new_tokens and not settings.trainable_tokens:
        return
    field = "new_tokens" if settings.new_tokens else "trainable_tokens"

    for table in _table_names(model):
        if matches_any(table, settings.lora_modules_to_save or []):
            continue
        if table in adapted:
            found = f"{table} gets an adapter, so its rows cannot train by themselves"
            yield Problem(field, found, fix=f"leave {last_part(table)} out of --lora_target_modules")
        elif reason := _why_rows_cannot_train(model.get_submodule(table)):
            yield Problem(field, f"{table} {reason}", fix=flag_of_whole_tables(model) or "--method full")


def flag_of_whole_tables(model: Any) -> str:
    """Return the flag that fully fine-tunes embedding and head; empty where peft would mistake a tied head.

    It keeps the tie of an embedding that has one of two names; with any other, the head would stay as it was.
    """
    from peft.utils.constants import EMBEDDING_LAYER_NAMES

    names = [last_part(name) for name in _table_names(model)]
    if len(names) == 1 and names[0] not in EMBEDDING_LAYER_NAMES:
        return ""
    return f"--lora_modules_to_save {','.join(names)}"


def _table_names(model: Any) -> list[str]:
    """The names of the modules with a row for each token: the embedding, and the head unless it is tied to it."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is None or head.weight is embedding.weight
    return [name for name, module in model.named_modules() if module is embedding or (module is head and not is_tied)]


def _names_for_peft(model: Any, name: str) -> list[str]:
    """``name``; or the full names of its modules if peft, which compares only the ends of strings, would take more."""
    ending = [full for full, _ in model.named_modules() if full.endswith(name)]
    meant = [full for full in ending if matches(full, name)]
    return [name] if meant == ending else meant


def _why_rows_cannot_train(table: Any) -> str:
    """Why single rows of a module cannot train by peft's layer for it; empty if they can."""
    if getattr(table, "bias", None) is not None:
        return "has a bias, which peft leaves out where single rows train"
    is_plain = type(table).forward in (torch.nn.Linear.forward, torch.nn.Embedding.forward)
    if not is_plain and not hasattr(table, "embed_scale"):
        return f"is a {type(table).__name__}, whose rows cannot train by themselves"
    return ""

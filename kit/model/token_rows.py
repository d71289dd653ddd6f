"""Rows of the embedding and of the output head for new tokens, and rows that train while the rest is frozen.

Promises:

- A new row starts as the mean of the rows of all earlier tokens, without noise: the same on every rank and at every
  start. A vocabulary that is padded gives its free rows first.
- With adapters, the rows of ``new_tokens`` and ``trainable_tokens`` train and are saved, in the embedding and, where it
  is a matrix of its own, in the head. Modules of ``lora_modules_to_save`` train whole. Both are peft's own mechanisms,
  so plain peft opens the result.
"""

import json
from typing import Any

import torch

from kit.config.settings.method import MethodSettings
from kit.config.settings.model import ModelSettings
from kit.errors import Problem, UserError, did_you_mean
from kit.model.locate import ADAPTER_FILES, open_adapter
from kit.model.tokenizer import ids_of, open_tokenizer


def num_rows(model: Any) -> int:
    """Return the number of rows of the embedding."""
    return model.get_input_embeddings().weight.shape[0]


def grow(model: Any, settings: MethodSettings) -> None:
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
        config = json.loads((open_adapter(adapter) / ADAPTER_FILES[0]).read_text(encoding="utf-8"))
        return bool(config.get("trainable_token_indices") or config.get("modules_to_save"))
    except (UserError, OSError, ValueError, AttributeError, RecursionError):  # ``check_adapter`` reports it
        return False


def describe_new_rows(settings: ModelSettings, tokenizer: Any, rows_before: int) -> list[str]:
    """Say which ids the new tokens have and where their rows come from, as lines for the user.

    Args:
        rows_before: of the model as it lies on disk.
    """
    ids = ids_of(tokenizer, settings.new_tokens)
    if not ids:
        return []
    shown = ", ".join(f"{token} ({id_})" for token, id_ in list(zip(settings.new_tokens or [], ids, strict=True))[:8])
    more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
    free = sum(id_ < rows_before for id_ in ids)
    where = [f"{free} in free rows of the padded vocabulary"] * bool(free)
    where += [f"embeddings grow from {rows_before} to {max(ids) + 1} rows"] * (free < len(ids))
    return [f"new tokens: {shown}{more}; {', '.join(where)}; they start as the mean of the others"]


def beside_adapters(model: Any, settings: MethodSettings) -> dict[str, Any]:
    """Return the arguments of ``LoraConfig`` for what trains beside the adapters."""
    whole = [name for end in settings.lora_modules_to_save or [] for name in _for_peft(model, end)]
    options: dict[str, Any] = {}
    names = _table_names(model)
    is_tied = len(names) == 1
    if whole:
        options = {"modules_to_save": whole, "ensure_weight_tying": is_tied and _is_among(names[0], whole)}
    tokens = [*(settings.new_tokens or []), *(settings.trainable_tokens or [])]
    names = [name for name in names if not _is_among(name, whole)]
    if tokens and names:
        ids = sorted(set(ids_of(open_tokenizer(settings), tokens)))
        options["trainable_token_indices"] = {name: ids for name in names}
    return options


def check_beside(settings: MethodSettings, meta_model: Any) -> list[Problem]:
    """Check ``lora_modules_to_save``, and whether rows of this model can train alone."""
    whole, problems = list(settings.lora_modules_to_save or []), []
    modules = dict(meta_model.named_modules())
    tables = _table_names(meta_model)
    head = meta_model.get_output_embeddings()
    adapted = _is_adapted(settings, meta_model)
    able = {
        name.rsplit(".", 1)[-1]
        for name, module in modules.items()
        if next(module.parameters(recurse=False), None) is not None and not adapted(name, module)
    }
    expected = f"some of {', '.join(sorted(able))}"
    for name in whole:
        matching = [(full, module) for full, module in modules.items() if _is_among(full, [name])]
        if not matching:
            problems.append(Problem("lora_modules_to_save", f"no module {name!r}", expected, did_you_mean(name, able)))
        elif name not in able and not all(full in tables or module is head for full, module in matching):
            found = f"{name!r} gets an adapter, or holds modules that do"
            problems.append(Problem("lora_modules_to_save", found, expected))
    if len(tables) == 1 and any(module is head for full, module in modules.items() if _is_among(full, whole)):
        embedding = tables[0].rsplit(".", 1)[-1]
        if not _is_among(tables[0], whole):
            found = "the output head without the embedding, to which it is tied in this model"
            problems.append(Problem("lora_modules_to_save", found, fix=f"--lora_modules_to_save {embedding}"))
    field = "new_tokens" if settings.new_tokens else "trainable_tokens"
    if getattr(settings, field):
        for name in tables:
            if not _is_among(name, whole) and (found := _unfit(modules[name], adapted(name, modules[name]))):
                short = ",".join(table.rsplit(".", 1)[-1] for table in tables)
                problems.append(Problem(field, f"{name} {found}", fix=f"--lora_modules_to_save {short}"))
    return problems


def _table_names(model: Any) -> list[str]:
    """The names of the modules with a row for each token: the embedding, and the head unless it is tied to it."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = outputs is None or outputs.weight is inputs.weight
    return [name for name, module in model.named_modules() if module is inputs or (module is outputs and not is_tied)]


def _is_among(name: str, ends: list[str]) -> bool:
    """Whether a module's full name is one of the names, or ends with one after a dot."""
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _for_peft(model: Any, end: str) -> list[str]:
    """The name as it is, or full names where peft, which compares only the ends of texts, would take more modules."""
    ending = [name for name, _ in model.named_modules() if name.endswith(end)]
    meant = [name for name in ending if _is_among(name, [end])]
    return [end] if meant == ending else meant


def _is_adapted(settings: MethodSettings, model: Any) -> Any:
    """A function that tells of a module, by name and module, whether it gets an adapter."""
    targets, head = settings.lora_target_modules, model.get_output_embeddings()

    def adapted(name: str, module: Any) -> bool:
        if isinstance(targets, list):
            return _is_among(name, targets)
        return isinstance(module, torch.nn.Linear) and module is not head

    return adapted


def _unfit(table: Any, is_adapted: bool) -> str:
    """Why single rows of a module cannot train by peft's layer for it; empty if they can."""
    if is_adapted:
        return "gets an adapter, so its rows cannot train by themselves"
    if getattr(table, "bias", None) is not None:
        return "has a bias, which peft leaves out where single rows train"
    is_plain = type(table).forward in (torch.nn.Linear.forward, torch.nn.Embedding.forward)
    if not is_plain and not hasattr(table, "embed_scale"):
        return f"is a {type(table).__name__}, whose rows cannot train by themselves"
    return ""

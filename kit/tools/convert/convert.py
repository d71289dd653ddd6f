"""Converts one file: reads it, recognises its kit, and makes a valid recipe, or says all that is in the way.

Keys that have another name or other values here stand in the tables of ``kit.config.other_kits``. ``KITS`` has a
function for each kit, which reads those that need more: batch, data, template, evaluation.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from kit.config.optimisers import OPTIMISERS
from kit.config.other_kits import kit_of
from kit.config.recipe import Recipe
from kit.config.recipe_file import read_yaml
from kit.config.validation import check_recipe, problems_with_secrets
from kit.system.errors import Problem, UserError, first_line, raise_if
from kit.tools.convert import axolotl, llama_factory, ms_swift, trl
from kit.tools.convert.draft import Draft, Group, is_nothing, is_true, number, shown
from kit.tools.convert.rollouts import take_rollouts
from kit.tools.convert.write import recipe_text

KITS: dict[str, Callable[[Draft], None]] = {
    "axolotl": axolotl.convert,
    "LLaMA-Factory": llama_factory.convert,
    "TRL": trl.convert,
    "ms-swift": ms_swift.convert,
}
_DATA = """
    dataset datasets dataset_name pretraining_dataset test_datasets eval_dataset val_dataset dataset_mixture
    dataset_config dataset_train_split dataset_test_split dataset_text_field dataset_dir
    cached_dataset cached_val_dataset columns max_samples
""".split()
_HELD_OUT = ("val_set_size", "val_size", "split_dataset_ratio")


def convert(
    path: Path, num_processes: int | None = None, drop: Collection[str] = (), flags: Mapping[str, Any] | None = None
) -> Draft:
    """Convert a file to a draft whose recipe loads.

    Args:
        num_processes: over all machines; None: as the file says, or one.
        drop: keys that may be left out although that changes training.
        flags: settings of ours, which win over the file.

    Raises:
        UserError: it cannot be read, is of no known kit, asks for what this kit does not do, or the result would not
            be a valid recipe.
    """
    if path.suffix == ".sh":
        fix = "type its flags after `kit train`: the error names the equivalent of each"
        raise UserError(str(path), "a shell script", "key: value lines", fix)
    values, lines = read_yaml(path)
    kit = kit_of(values, Recipe.model_fields)
    if not kit:
        if "dataset" in values and set(values) <= {*Recipe.model_fields, "by_method", "by_objective"}:
            found, expected, fix = "a recipe of this kit", "a file of another one", f"kit train --recipe {path}"
        else:
            found, expected, fix = "no file of a known kit", f"one of {', '.join(KITS)}", ""
        raise UserError(str(path), found, expected, fix)
    given = {key: value for key, value in values.items() if not is_nothing(value)}
    draft = Draft(kit, given, path, lines, flags or {})
    try:
        count = int(number(draft.take("num_processes", 1)))  # which `trl` hands to the launcher
        draft.num_processes = num_processes or count
        if "dataset" in draft.typed:
            _leave_data(draft)
        take_rollouts(draft)
        KITS[kit](draft)
        draft.read(*list(draft.given))
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        found = f"a value of a wrong kind ({first_line(error)})"
        raise UserError(*draft.refused, Problem(str(path), found, f"the file as {kit} takes it")) from None
    draft.put_defaults()
    if draft.objective == "distil":
        _finish_distillation(draft)
    _leave_what_nothing_reads(draft)
    for name, value in draft.typed.items():
        draft.put(name, value, "typed")
    raise_if(draft.refused)  # alone: what else is in the way does not matter
    _leave_dropped(draft, drop)
    draft.config = draft.config or ("single" if draft.num_processes == 1 else "ddp")
    raise_if(draft.problems + _not_dropped(draft, drop) + _invalid(draft))
    return draft


def _leave_data(draft: Draft) -> None:
    """Leave out what describes the data of the file. A share of any can be held out; a number may be all of them."""
    for key in [key for key in draft.given if key in _DATA or (key in _HELD_OUT and number(draft.given[key]) >= 1)]:
        draft.leave(key, draft.take(key), "--dataset replaces this data", Group.NEEDLESS)


def _finish_distillation(draft: Draft) -> None:
    """Translate a beta of 0 or 1 to a divergence, and add room for the student's answers to max_length."""
    beta = number(draft.values.pop("beta", 0))
    draft.put("divergence", {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd"), f"beta {beta:g}")
    if 0 < beta < 1:
        draft.put("beta", beta)
    if number(draft.values.get("on_policy_share", 0)):
        both = [int(number(draft.values[name])) for name in ("max_length", "max_new_tokens")]
        draft.put("max_length", sum(both), f"{both[0]} for the prompt, and the answer")


def _leave_what_nothing_reads(draft: Draft) -> None:
    """Leave out settings that have no effect in combination with others."""
    settings = {**draft.values, **draft.typed}
    names = [name for name in draft.values if name.startswith(("lora_", "use_dora", "use_rslora", "init_lora"))]
    unread = dict.fromkeys(names, "method full has no adapter") if settings.get("method") == "full" else {}
    if number(settings.get("on_policy_share", 0)):
        unread["save_only_model"] = "on-policy runs resume from full checkpoints only"
    elif draft.objective == "distil":
        unread |= dict.fromkeys(("temperature", "top_p", "max_new_tokens"), "distillation is off-policy here")
    if draft.objective == "simpo":
        unread["cpo_alpha"] = "simpo has no SFT loss on the chosen answers; --objective cpo has one"
    if settings.get("report_to") in (None, [], "none"):
        unread |= dict.fromkeys(("run_name", "project"), "no tracker is used")
    if not is_true(settings.get("streaming")):
        unread["shuffle_buffer_size"] = "streaming is off"
    if draft.config == "fsdp" and OPTIMISERS[settings.get("optim", "adamw_torch")].bitsandbytes:
        unread["optim"] = (
            "bitsandbytes does not support sharded weights; with method full, --optim adamw_bf16 saves memory"
        )
    for name in [name for name in unread if name in draft.values and name not in draft.typed]:
        value = draft.values.pop(name)
        differs = name == "optim" or (name == "cpo_alpha" and number(value))
        group = Group.TRAINING if differs else Group.NEEDLESS
        draft.leave(draft.sources.get(name, name), value, unread[name], group)


def _leave_dropped(draft: Draft, drop: Collection[str]) -> None:
    """Leave out a setting whose key is dropped for another reason than that it has none here."""
    keys = set(drop) - {each.key for each in draft.left_out} - set(draft.typed)
    for name in [name for name in draft.values if draft.sources.get(name, name) in keys]:
        draft.leave(draft.sources.get(name, name), draft.values.pop(name), "dropped")


def _not_dropped(draft: Draft, drop: Collection[str]) -> list[Problem]:
    """A problem for each key that changes training, unless it may be left out. The last one has the fix."""
    missing = [each for each in draft.left_out if each.group is Group.TRAINING]
    problems = []
    for each in missing:
        if each.key not in drop:
            where = _place(draft, each.key) or f"{draft.path} {each.key}"
            problems.append(Problem(where, f"{shown(each.value)} {Group.TRAINING.value}; {each.reason}"))
    if problems:
        keys = ",".join(dict.fromkeys(each.key for each in missing))
        problems[-1] = replace(problems[-1], fix=f"--drop {keys} leaves {'them' if ',' in keys else 'it'} out")
    return problems


def _place(draft: Draft, key: str) -> str:
    """Where a key, or what is in it, stands in the file; empty if it does not."""
    top = re.split(r"[.\[]", key)[0]
    return f"{draft.path}:{draft.lines[top]} {key}" if top in draft.lines else ""


def _invalid(draft: Draft) -> list[Problem]:
    """What a run would say of the recipe, by the keys of the file."""
    values = yaml.load(recipe_text(draft, []), yaml.BaseLoader) or {}
    keys = {name: name if name in draft.typed else draft.sources.get(name, name) for name in values}
    where = {name: _place(draft, key) or key for name, key in keys.items()}
    problems = check_recipe(values, where)[1] + problems_with_secrets(draft.values, {})
    # Of a dataset that was refused, nobody has to be told that it is missing.
    return [each for each in problems if not (draft.problems and each.found == "missing")]

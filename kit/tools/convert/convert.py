"""Converts one file: reads it, recognises its kit, and makes a valid recipe, or says all that is in the way.

``KITS`` has a module for each kit. Its ``convert`` reads the keys that have another name or form than here; the rest is
read by ``kit.tools.convert.words``.
"""

import re
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer

from kit.config.fields import expected, is_switch
from kit.config.hints import hint_for_value
from kit.config.other_files import kit_of
from kit.config.recipe import Recipe
from kit.config.recipe_file import read_yaml
from kit.config.validation import NAME, check_recipe, problems_with_secrets, validate
from kit.data.chat.shipped import SHIPPED
from kit.durable import read_small
from kit.errors import Problem, UserError, first_line, raise_if
from kit.tools.convert import (
    axolotl,
    llama_factory,
    llama_factory_v1,
    swift,
    trainer,
    trl,
    words,
)
from kit.tools.convert.data import BARE
from kit.tools.convert.draft import Draft, Group, as_list, is_nothing, number, shown
from kit.tools.convert.shell import Command, read_command
from kit.tools.convert.write import recipe_text

KITS: dict[str, Callable[[Draft, Path], None]] = {
    "axolotl": axolotl.convert,
    "LLaMA-Factory": llama_factory.convert,
    "LLaMA-Factory v1": llama_factory_v1.convert,
    "TRL": trl.convert,
    "ms-swift": swift.convert,
}
CHANGES = "changes what is learned"
# Keys inside a section that describes data.
_OF_DATA = re.compile(r"((test_|pretraining_|train_|eval_)?datasets?|dataset_(val|mixture))[.\[]")
_KEYS = frozenset(Recipe.model_fields)


@dataclass(frozen=True)
class Converted:
    """A recipe that loads, and how to run it."""

    kit: str
    draft: Draft
    config: str  # the Accelerate config

    def text(self, header: list[str]) -> str:
        """The recipe, with ``header`` as comments at its top."""
        return recipe_text(self.draft, header)


def convert(
    path: Path, num_processes: int | None = None, drop: Collection[str] = (), flags: Mapping[str, Any] | None = None
) -> Converted:
    """Convert a file.

    Args:
        num_processes: over all machines; None: one.
        drop: keys that may be left out although that changes what is learned.
        flags: settings of ours, which win over the file.

    Raises:
        UserError: it cannot be read, is of no known kit, asks for what this kit does not do, or the result would not
            be a valid recipe.
    """
    if path.is_dir():
        fix = f"kit export {shlex.quote(str(path))} --output_dir model makes a model of a checkpoint"
        raise UserError(Problem(str(path), "a folder", "a configuration file of another kit", fix))
    if path.suffix in (".sh", ".bash"):
        command = _read_script(path)
        values, lines, kit = command.flags, command.lines, command.kit
        num_processes = num_processes or command.num_processes
        source = Path(*re.sub(r"\.py\b", "", command.program).split())  # its last word names the objective
    else:
        source = path
        values, lines = read_yaml(path)
        kit = kit_of(values, _KEYS)
    if kit not in KITS:
        raise UserError(_unknown(path, values, kit))
    if kit == "TRL":
        num_processes = num_processes or trl.num_processes(values)
    draft = Draft(
        {key: value for key, value in values.items() if not is_nothing(value)}, num_processes or 1, typed=flags or {}
    )
    _read(draft, KITS[kit], path, source)
    _leave_what_does_not_fit(draft)
    if "dataset" in draft.typed:
        _leave_data_of_the_file(draft)
    if draft.typed.get("report_to") == "none":
        for name in ("run_name", "project"):  # no one reads them
            draft.values.pop(name, None)
    for name, value in draft.typed.items():
        draft.put(name, value, "typed")
    trainer.take_optimiser_that_shards(draft)
    trainer.fit_micro_batch(draft)
    _leave_what_the_model_lacks(draft)
    raise_if(draft.other_kind)  # alone: what else is in the way does not matter
    raise_if(draft.problems + _not_dropped(draft, path, lines, drop) + _invalid(draft))
    config = draft.config or ("single" if draft.num_processes == 1 else "ddp")
    return Converted(kit, draft, config)


def _read_script(path: Path) -> Command:
    try:
        return read_command(read_small(path, errors="replace"), str(path))
    except OSError as error:
        raise UserError(Problem(str(path), error.strerror or "cannot be read", "a shell script")) from None


def _read(draft: Draft, read: Callable[[Draft, Path], None], path: Path, source: Path) -> None:
    """Read all keys. A value that is no number becomes a problem.

    Args:
        path: the file, for messages.
        source: where the kit looks for other files, and what says by its folders which trainer reads it.
    """
    try:
        read(draft, source)
        words.take_rest(draft)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        found = f"a value of a wrong kind ({first_line(error)})"
        problem = Problem(str(path), found, "the file as that kit takes it")
        raise UserError(*draft.other_kind, *draft.problems, problem) from None


def _leave_data_of_the_file(draft: Draft) -> None:
    """Remove what describes the data of the file, which ``--dataset`` replaces."""
    names = [f"dataset_{key}" for key in ("config", "split", "revision", "columns")]
    held_out = "eval_dataset" if "eval_dataset" in draft.values else "eval_split_size"
    value = draft.values.get(held_out)
    # A share of any data can be held out; a number of rows may be all of them.
    if value is not None and (held_out == "eval_dataset" or number(value) >= 1) and held_out not in draft.typed:
        names += [name for name in draft.values if name.startswith(("eval_", "early_", "per_device_eval"))]
        names += ["keep_best", "metric_for_best_model"]
        reason = "of the data that --dataset replaces; --eval_split_size 0.1 or --eval_dataset FILE evaluates"
        draft.drop(held_out, value, Group.NEEDLESS, reason)
    for name in names:
        draft.values.pop(name, None)
    draft.left_out = [each for each in draft.left_out if not _OF_DATA.match(each.key)]
    if draft.template == BARE:  # that of rows with a prompt_format
        draft.template = ""


def _leave_what_the_model_lacks(draft: Draft) -> None:
    """Leave out what the file asks of its own model and the one that was typed lacks, if that is a folder."""
    if "model_name_or_path" not in draft.typed:
        return
    model = str(draft.typed["model_name_or_path"])
    config, tokenizer = Path(model, "config.json"), Path(model, "tokenizer.json")
    weight, name = draft.values.get("router_aux_loss_coef"), draft.values.get("chat_template")
    is_typed = "router_aux_loss_coef" in draft.typed
    if weight is not None and not is_typed and config.is_file() and "expert" not in read_small(config):
        del draft.values["router_aux_loss_coef"]
        draft.drop("router_aux_loss_coef", weight, Group.NEEDLESS, f"{model} has no experts")
    if name in SHIPPED and "chat_template" not in draft.typed and tokenizer.is_file():
        known = ["bos_token", "eos_token", *as_list(draft.values.get("new_tokens"))]
        try:
            id_of = Tokenizer.from_file(str(tokenizer)).token_to_id
        except Exception:  # of that library: it has no other kind. The run says what is wrong with the file
            return
        if missing := [each for each in SHIPPED[name].tokens if each not in known and id_of(each) is None]:
            del draft.values["chat_template"]
            reason = f"{model} lacks {', '.join(missing)}; with --drop, its own is taken. Or --chat_template NAME"
            draft.drop("chat_template", name, Group.LEARNS, reason)


def _leave_what_does_not_fit(draft: Draft) -> None:
    """Leave out each value that our setting does not take, by the schema: ``true`` is no list of tokens."""
    for name, value in list(draft.values.items()):
        if name in draft.typed or fits(name, value):
            continue
        del draft.values[name]
        draft.notes.pop(name, None)
        info = Recipe.model_fields[name]
        reason = hint_for_value(name, str(value)) or f"{name} takes {expected(info)}"
        draft.drop(draft.sources.get(name, name), value, Group.LEARNS, f"{reason}; with --drop, its default", name)


def fits(name: str, value: Any) -> bool:
    """Whether a setting of ours takes a value. A switch of YAML is no text: it fits only what may be true or false."""
    info = Recipe.model_fields[name]
    switches = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, bool)]
    if switches and not is_switch(info):
        return False
    as_read = yaml.load(recipe_text(Draft({}, values={name: value}), []), yaml.BaseLoader)
    return not validate(Recipe, as_read, {}, Recipe.model_fields)[2] & {name}


def _unknown(path: Path, values: Mapping[str, Any], kit: str) -> Problem:
    if set(values) <= _KEYS | {"by_method", "by_objective"} and "dataset" in values:
        return Problem(str(path), "a recipe of this kit", "a file of another one", f"kit train --recipe {path}")
    known = ", ".join(dict.fromkeys(KITS))
    return Problem(str(path), f"a file of {kit}" if kit else "no file of a known kit", f"one of {known}")


def _not_dropped(draft: Draft, path: Path, lines: Mapping[str, int], drop: Collection[str]) -> list[Problem]:
    """A problem for each key that changes what is learned, unless it may be left out. The last one has the fix."""
    learns = [each for each in draft.left_out if each.group is Group.LEARNS]
    problems = []
    for each in learns:
        if each.key not in drop:
            top = each.key.split(".")[0].split("[")[0]
            where = f"{path}:{lines[top]} {each.key}" if top in lines else f"{path} {each.key}"
            problems.append(Problem(where, f"{shown(each.value)} {CHANGES}; {each.reason}"))
    keys = dict.fromkeys(each.key for each in learns)
    if problems:
        problems[-1] = replace(
            problems[-1], fix=f"--drop {','.join(keys)} leaves {'them' if len(keys) > 1 else 'it'} out"
        )
    return problems


def _invalid(draft: Draft) -> list[Problem]:
    """What a run would say of the recipe, and each value that only a shell, or another file, fills in."""
    unfilled = {
        name: Problem(name, f"found {shown(value)}, which another program fills in", fix=f"--{name} {NAME}")
        for name, value in draft.values.items()
        if name not in draft.typed and re.search(r"\$[\w({]", str(value))
    }
    values = yaml.load(recipe_text(draft, []), yaml.BaseLoader) or {}
    _, problems = check_recipe(values, {key: key for key in values})
    problems += problems_with_secrets(draft.values, {})
    # Of a data set that was refused, nobody has to be told that it is missing.
    others = [each for each in problems if not (each.where in unfilled or (draft.problems and each.found == "missing"))]
    return [*unfilled.values(), *others]

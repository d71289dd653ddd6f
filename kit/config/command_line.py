"""From words and files to one validated ``Request``: flags beat the recipe, the recipe beats the defaults.

Promises: whatever a user typed, no traceback, and every problem at once, each with its flag or ``file:line``.
Plain Python, pydantic and PyYAML: a mistyped key is answered before torch is imported.
"""

import os
import re
import reprlib
import sys
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from kit.config.conflicts import contradictions
from kit.config.other_kits import FOREIGN
from kit.config.recipe import (
    DEFAULT_RECIPE,
    RECIPES,
    DatasetEntry,
    Launch,
    Recipe,
    Request,
    choices,
    expected,
    is_optional,
)
from kit.errors import Problem, UserError, did_you_mean, raise_if
from kit.secrets import redacted

FLAGS = Launch.model_fields | Recipe.model_fields
PATHS = ("model_name_or_path", "dataset", "eval_dataset", "chat_template", "adapter_name_or_path")

# One value in a message: short, whatever a file may hold.
_short = reprlib.Repr()
_short.maxlevel, _short.maxstring = 2, 80

Model = TypeVar("Model", bound=BaseModel)


def read_command_line(argv: list[str], stands_for: dict[str, str] | None = None) -> Request:
    """Merge recipe file and flags, and validate once. Never raises for what a user typed: see ``problems``.

    ``stands_for``: flags whose value another flag takes where that one is not given. ``--help`` prints and exits with
    status 0.
    """
    if any(word in ("-h", "--help") for word in argv):
        print_help()
    flags, problems = read_flags(argv)
    for flag, other in (stands_for or {}).items():
        if flag in flags:
            flags.setdefault(other, flags[flag])
    launch_flags = {name: flags.pop(name) for name in Launch.model_fields if name in flags}
    launch, more, _ = _check(Launch, launch_flags, {name: f"--{name}" for name in launch_flags})
    problems += more

    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    in_doubt: set[str] = set()
    name = launch.recipe or (None if "model_name_or_path" in flags else DEFAULT_RECIPE)
    if name:
        try:
            path = find_file(name, RECIPES, "recipe")
            name = path.stem
            values, places, more = read_recipe_file(path)
            problems += more
        except UserError as error:
            problems += error.problems
            in_doubt = set(Recipe.model_fields) - set(flags)
    if "dataset" in flags and "eval_dataset" in values and "eval_dataset" not in flags:
        # The recipe's evaluation belongs to its own data.
        of_recipe = {"eval_dataset", "eval_on_start", "eval_steps", "predict_with_generate", "max_eval_samples"}
        for key in {"eval_dataset"} if "eval_split_size" in flags else of_recipe:
            values.pop(key, None)
    values |= flags
    places |= {flag: f"--{flag}" for flag in flags}
    recipe, more = _check_recipe(values, places, in_doubt)
    if secret := _secrets({f"--{key}": value for key, value in launch_flags.items()}, {}) + _secrets(values, places):
        return Request(launch, None, DEFAULT_RECIPE, secret)  # other problems may quote part of a value
    name = name or Path(str(values["model_name_or_path"])).name or "run"
    return Request(launch, recipe, name, problems + more)


def load_recipe(name: str) -> Recipe:
    """A shipped or own recipe by name or path. Raises ``UserError`` with every problem it has."""
    values, places, problems = read_recipe_file(find_file(name, RECIPES, "recipe"))
    recipe, more = _check_recipe(values, places)
    raise_if(problems + more)
    assert recipe is not None
    return recipe


def find_file(name: str, folder: Path, kind: str) -> Path:
    """A path as given, or a bare name with or without ``.yaml`` found in ``folder``."""
    candidates = [Path(name), folder / name, folder / f"{name}.yaml"]
    found = next((path for path in candidates if os.path.isfile(path)), None)
    if found is None:
        names = sorted(path.stem for path in folder.glob("*.yaml"))
        what = f"{name!r} is a folder" if os.path.isdir(name) else f"no {kind} {name!r}"
        hint = did_you_mean(Path(name).stem, names)
        raise UserError(Problem(f"--{kind}", what, f"a YAML file, or one of {', '.join(names)}", hint))
    return found


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """A YAML mapping read safely, and the 1-based line of each top-level key. Refuses duplicate keys."""
    values, lines, problems = _parse_yaml(path, yaml.SafeLoader)
    raise_if(problems)
    return values, lines


def read_recipe_file(path: Path) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """Values of a recipe file, the ``file:line`` of each key, and the keys given twice.

    Values are text, as flags are, so that both are read alike and YAML has no say: 1e-4 is a number, yes is
    not a 1, and a revision 0123 keeps its zero. Paths are taken from the recipe's own folder first.
    """
    values, lines, problems = _parse_yaml(path, yaml.BaseLoader)
    values = {key: None if value in ("", "~", "null") else value for key, value in values.items()}
    for key in PATHS:
        values |= {key: _beside(path.parent, values[key])} if key in values else {}
    return values, {key: f"{_shown_path(path)}:{line} {key}" for key, line in lines.items()}, problems


def _beside(folder: Path, value: Any) -> Any:
    """A path, or each of a list, as seen from here where ``folder`` has it."""
    if isinstance(value, list):
        return [_beside(folder, item) for item in value]
    if isinstance(value, dict):
        return value | {"path": _beside(folder, value["path"])} if "path" in value else value
    if not isinstance(value, str) or not value:
        return value
    # An absolute pattern is no pattern of this folder.
    matches = os.path.exists(folder / value) or (not os.path.isabs(value) and any(folder.glob(value)))
    return str(folder / value) if matches else value


def _parse_yaml(path: Path, loader_class: Any) -> tuple[dict[str, Any], dict[str, int], list[Problem]]:
    """Values and lines of the top-level keys, and a problem for each key that comes twice, at any depth."""
    shown = _shown_path(path)
    try:
        loader = loader_class(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is None:
            return {}, {}, []
        if not isinstance(node, yaml.MappingNode):
            raise UserError(Problem(shown, f"holds a {node.id}", "key: value lines"))
        values = {key.value: loader.construct_object(value, deep=True) for key, value in node.value}
        lines = {key.value: key.start_mark.line + 1 for key, _ in reversed(node.value)}
        return values, lines, _duplicates(node, shown)
    except UnicodeDecodeError as error:
        raise UserError(Problem(shown, f"not UTF-8 at byte {error.start}", "a YAML text file")) from None
    except OSError as error:
        raise UserError(Problem(shown, error.strerror or "cannot be read")) from None
    except RecursionError:
        raise UserError(Problem(shown, "nested too deeply", "key: value lines")) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{shown}:{mark.line + 1}" if mark else shown
        found = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(Problem(where, f"not valid YAML ({found})", "key: value lines")) from None
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        # PyYAML passes on what int() and date() make of 2024-13-45 or !!int x, and dict() of a list as a key.
        raise UserError(Problem(shown, f"not valid YAML ({error})", "key: value lines")) from None


def _duplicates(node: yaml.Node, shown: str) -> list[Problem]:
    problems = []
    nodes, visited = [node], set()
    while nodes:
        node = nodes.pop()
        if id(node) in visited:  # an alias: without this, ten lines can hold a billion of them
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            nodes += [value for _, value in node.value]
            lines: dict[str, int] = {}
            for key, _ in node.value:
                line = key.start_mark.line + 1
                if key.value in lines:
                    where, first = f"{shown}:{line} {key.value}", f"the first is in line {lines[key.value]}"
                    problems.append(Problem(where, "given a second time", fix=f"keep one: {first}"))
                lines.setdefault(key.value, line)
    return problems


def _shown_path(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def read_flags(argv: list[str]) -> tuple[dict[str, str], list[Problem]]:
    """Text by flag, known or not, ``-`` read as ``_``; and what is no flag, or is given twice."""
    flags: dict[str, str] = {}
    problems = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            name = word.lstrip("-").partition("=")[0]
            hint = FOREIGN.get(name) or did_you_mean(name, FLAGS)
            problems.append(Problem(repr(word), "a word without a flag", "--flag value", hint))
            continue
        name, has_value, value = word[2:].partition("=")
        name = name.replace("-", "_")
        # A negative number is a value; a word that starts with -- is the next flag.
        if not has_value and words and not words[0].startswith("--"):
            value = words.pop(0)
        elif not has_value and name in FLAGS and FLAGS[name].annotation is bool:
            value = "true"
        if name in flags:
            problems.append(Problem(f"--{name}", f"given twice: {flags[name]!r} and {value!r}", fix="keep one"))
        else:
            flags[name] = value
    return flags, problems


def _check_recipe(
    values: dict[str, Any], places: dict[str, str], in_doubt: Iterable[str] = ()
) -> tuple[Recipe | None, list[Problem]]:
    """Validate, with unknown keys and contradictions. ``in_doubt``: what earlier problems may have hidden."""
    unknown = [_unknown(key, places[key]) for key in values if key not in Recipe.model_fields]
    # `datset: x` answered with `dataset` need not be told that `dataset` is missing too.
    doubts = set(in_doubt).union(*(re.findall(r"\w+", problem.fix) for problem in unknown))
    known = {key: value for key, value in values.items() if key in Recipe.model_fields}
    recipe, problems, wrong = _check(Recipe, known, places, doubts)
    for fields, found, fix in contradictions(recipe):
        if not doubts.union(wrong).intersection(fields):
            problems.append(Problem(places.get(fields[0], fields[0]), found, fix=fix))
    return None if wrong else recipe, unknown + problems


def _check(
    model: type[Model], values: dict[str, Any], places: dict[str, str], in_doubt: Container[str] = ()
) -> tuple[Model, list[Problem], set[str]]:
    """An instance made of all that is right, a problem for each field that is not, and the names of these."""
    values = {name: _meant(model, name, value) for name, value in values.items()}
    try:
        return model.model_validate(values), [], set()
    except ValidationError as error:
        # A union reports once per member, a list once per item: the first that goes deepest is enough.
        items = sorted(error.errors(include_url=False), key=lambda item: -len(item["loc"]))
        first = {str(item["loc"][0]): item for item in reversed(items)}
    problems = []
    for name in [name for name in model.model_fields if name in first]:
        info, item = model.model_fields[name], first[name]
        if item["type"] == "missing" and len(item["loc"]) == 1:
            if name not in in_doubt:
                problems.append(Problem(name, "missing", info.description or "", f"add --{name}"))
            continue
        if any(isinstance(step, int) for step in item["loc"]) and isinstance(values[name], str | list):
            inner = _inside_entry(places.get(name, name), item)
            if inner:
                problems.append(inner)
                continue
        hint = did_you_mean(item["input"], choices(info.annotation)) if isinstance(item["input"], str) else ""
        found = "no value" if values[name] in ("", None) else f"found {_short.repr(values[name])}"
        problems.append(Problem(places.get(name, name), found, expected(info), hint))
    right = {name: value for name, value in values.items() if name not in first}
    stand_in = {name: "?" for name, info in model.model_fields.items() if info.is_required()}
    return model.model_validate(stand_in | right), problems, set(first)


def _inside_entry(place: str, item: Any) -> Problem | None:
    """What is wrong within one of several data sets; None if ``item`` is of another list."""
    loc, fields = item["loc"], DatasetEntry.model_fields
    if not any("DatasetEntry" in str(step) for step in loc):
        return None
    number, *keys = loc[next(i for i, step in enumerate(loc) if isinstance(step, int)) :]
    where = f"{place}[{number}]" + (f".{keys[0]}" if keys else "")
    if not keys or keys[0] not in fields:
        found = "unknown key" if keys else f"found {_short.repr(item['input'])}"
        return Problem(where, found, ", ".join(fields), did_you_mean(str(keys[0]), fields) if keys else "")
    found = "missing" if item["type"] == "missing" else f"found {_short.repr(item['input'])}"
    return Problem(where, found, expected(fields[keys[0]]))


def _meant(model: type[BaseModel], name: str, value: Any) -> Any:
    """``none`` and null as nothing, where nothing is possible."""
    is_null = value.strip().lower() in ("~", "null", "none") if isinstance(value, str) else value is None
    if not is_null:
        return value
    info = model.model_fields[name]
    return info.default if info.default in ([], {}) else None if is_optional(info) else value


def _secrets(values: dict[str, Any], places: dict[str, str]) -> list[Problem]:
    """Settings that hold a credential: a run stores what it was started with, and models are passed on."""
    fix = "the hub and the trackers take theirs from the environment; write paths and names without"
    return [
        Problem(places.get(key, key), f"a credential in {redacted(text)!r}", "none: a run stores its settings", fix)
        for key, value in values.items()
        for text in _texts(value)
        if redacted(text) != text
    ]


def _texts(value: Any) -> Iterator[str]:
    """All text in what YAML gave."""
    values, visited = [value], set()
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif id(value) not in visited:  # see _duplicates
            visited.add(id(value))
            values += [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []


def _unknown(name: str, where: str) -> Problem:
    if name in FOREIGN:
        return Problem(where, "not a setting of this kit", fix=FOREIGN[name])
    is_flag = where.startswith("--")
    if name in Launch.model_fields:
        return Problem(where, "not a key of a recipe", fix=f"give it on the command line: --{name}")
    hint = did_you_mean(name, FLAGS if is_flag else Recipe.model_fields)
    return Problem(where, "unknown flag" if is_flag else "unknown key", fix=hint or "--help lists what there is")


def print_help() -> NoReturn:
    """Every flag by group, with its unit, default and meaning. Exits with status 0."""
    lines = [
        f"usage: accelerate launch recipes/{Path(sys.argv[0]).name} [--config C] [--recipe R] [--flag value ...]",
        "",
        "Fine-tune a causal language model. Each flag below Launch is also a key of the recipe; flags win.",
    ]
    group = None
    for name, info in FLAGS.items():
        extra: Any = info.json_schema_extra
        if extra["group"] != group:
            group = extra["group"]
            lines += ["", group]
        unit = f" [{extra['unit']}]" if extra["unit"] else ""
        default = "required" if info.is_required() else f"default: {_shown_default(info.default)}"
        lines += [f"  --{name} <{expected(info)}>{unit}  ({default})", f"      {info.description}"]
    show("\n".join(lines))
    sys.exit(0)


def _shown_default(value: Any) -> str:
    if value is None or value == [] or value == {}:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def show(text: str) -> None:
    """Print, and take it calmly when the reader has gone, as ``head`` does."""
    try:
        # Data may hold what a terminal's encoding cannot.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(redacted(text).encode(encoding, "replace").decode(encoding), flush=True)
    except BrokenPipeError:
        # The interpreter flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

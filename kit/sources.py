"""Rows of a data set: from a file, a folder or the hub, checked one by one.

Promises: every row that cannot be used is named as ``file:line`` (or row, where there are no lines), with what was
found and what was expected; nothing is skipped but blank lines, which are counted; nothing is filled in.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from kit.errors import Problem, UserError, did_you_mean

FORMATS = (("messages",), ("prompt", "completion"), ("text",))
FIELDS = tuple(field for fields in FORMATS for field in fields)
ROLES = ("system", "user", "assistant")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
NUM_SHOWN = 10
HUB_SECONDS = 5.0  # to wait for the hub's first answer

Row = tuple[int, Any]  # 1-based number of the line or row, and a dict, a Problem, or None for a blank line


@dataclass(frozen=True)
class Source:
    """Where rows come from. ``digest`` is a hash of the bytes that hold them, whatever their path."""

    name: str  # as the user wrote it
    digest: str
    columns: list[str]  # of the first row
    rows: Callable[[list[str]], Iterator[Row]]  # given the columns that are needed
    num_rows: int | None = None  # None: not known without reading
    has_lines: bool = False

    def place(self, number: int) -> str:
        """Line or row ``number`` as a user can find it: ``train.jsonl:17``."""
        return f"{self.name}:{number}" if self.has_lines else f"{self.name} row {number}"


def open_source(name: str, split: str, flag: str) -> Source:
    """Find ``name``: a JSONL or parquet file, a folder written by ``save_to_disk``, or a hub id.

    ``split`` counts for folders with splits and hub ids; ``flag`` is the recipe's key, for messages.
    Raises ``UserError``.
    """
    path = Path(name).expanduser()
    try:
        if path.is_file():
            if path.suffix in (".jsonl", ".json", ".ndjson"):
                return _open_jsonl(name, path)
            if path.suffix == ".parquet":
                return _open_parquet(name, path)
            raise UserError(Problem(flag, f"{name!r} ends in {path.suffix!r}", ".jsonl or .parquet"))
        if path.is_dir():
            return _open_folder(name, path, split, flag)
    except OSError as error:
        raise UserError(Problem(flag, f"{name!r} cannot be read ({error.strerror or error})")) from None
    if not HUB_ID.fullmatch(name) or path.suffix in (".jsonl", ".json", ".parquet", ".csv", ".txt"):
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        found = f"no file or folder {name!r}" + ("" if path.parent.is_dir() else f", nor a folder {str(path.parent)!r}")
        expected = "a JSONL or parquet file, a folder written by save_to_disk, or a hub id"
        raise UserError(Problem(flag, found, expected, did_you_mean(path.name, siblings)))
    return _open_hub(name, split, flag)


def _digest(paths: Iterable[Path], *more: object) -> str:
    state = xxhash.xxh3_128(repr(more).encode())
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                state.update(chunk)
    return state.hexdigest()


def _open_jsonl(name: str, path: Path) -> Source:
    with path.open("rb") as file:
        if file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
            fix = f"jq -c '.[]' {name} > {path.stem}.jsonl"
            raise UserError(Problem(name, "one JSON array", "one JSON object a line", fix))
    columns = next((list(row) for _, row in _read_jsonl(name, path) if isinstance(row, dict)), [])
    return Source(name, _digest([path]), columns, lambda _: _read_jsonl(name, path), has_lines=True)


def _read_jsonl(name: str, path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{name}:{number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                row = json.loads(line) if line else None
            except UnicodeDecodeError as error:
                yield number, Problem(where, f"not UTF-8 at byte {error.start + 1} of the line", "UTF-8 text")
            except json.JSONDecodeError as error:
                yield (
                    number,
                    Problem(where, f"not JSON at column {error.colno} ({error.msg})", "one JSON object a line"),
                )
            except ValueError as error:  # an integer of more digits than Python converts
                yield number, Problem(where, str(error).split(";")[0], "one JSON object a line")
            except RecursionError:
                yield number, Problem(where, "nested too deeply", "one JSON object a line")
            else:
                if line and not isinstance(row, dict):
                    row = Problem(where, f"a JSON {type(row).__name__}", "an object in braces")
                yield number, row


def _open_parquet(name: str, path: Path) -> Source:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns, num_rows = file.schema_arrow.names, file.metadata.num_rows
    except ArrowException as error:
        found = f"not a readable parquet file ({str(error).splitlines()[0]})"
        raise UserError(Problem(name, found)) from None

    def rows(needed: list[str]) -> Iterator[Row]:
        with parquet.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=1000, columns=needed)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)

    return Source(name, _digest([path]), columns, rows, num_rows)


def _open_folder(name: str, path: Path, split: str, flag: str) -> Source:
    if (path / "dataset_dict.json").is_file():
        try:
            splits = [str(name) for name in json.loads((path / "dataset_dict.json").read_text())["splits"]]
        except (ValueError, KeyError, TypeError) as error:
            found = f"{name!r} cannot be opened: its dataset_dict.json is damaged ({_first_line(error)})"
            raise UserError(Problem(flag, found)) from None
        if split not in splits:
            hint = did_you_mean(split, splits)
            raise UserError(Problem(f"{flag}_split", f"{name} has no split {split!r}", ", ".join(splits), hint))
        path = path / split
    if not (path / "state.json").is_file():
        expected = "a folder written by datasets' save_to_disk, a JSONL or parquet file, or a hub id"
        raise UserError(Problem(flag, f"{name!r} is a folder without state.json", expected))
    import datasets

    try:
        return _from_dataset(name, datasets.load_from_disk(str(path)))
    except Exception as error:  # whatever the library makes of a damaged folder
        raise UserError(Problem(flag, f"{name!r} cannot be opened ({_first_line(error)})")) from None


def _open_hub(name: str, split: str, flag: str) -> Source:
    import datasets
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    tried = f"no file or folder {name!r}"
    if not constants.HF_HUB_OFFLINE:
        # One short request first: load_dataset retries for half a minute when the hub cannot be reached.
        try:
            HfApi().dataset_info(name, timeout=HUB_SECONDS)
        except HfHubHTTPError as error:
            fix = "check the name; a private or gated data set needs `hf auth login`"
            raise UserError(Problem(flag, f"{tried}, and the hub refuses it ({_first_line(error)})", fix=fix)) from None
        except Exception as error:  # the connection's own, of whichever client library is in use
            fix = "if it was downloaded before, set HF_HUB_OFFLINE=1"
            found = f"{tried}, and the hub cannot be reached ({_first_line(error)})"
            raise UserError(Problem(flag, found, fix=fix)) from None
    try:
        dataset = datasets.load_dataset(name, split=split)
    except Exception as error:  # its builders raise everything
        offline = " offline (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        found = f"{tried}, and split {split!r} of hub id {name!r} cannot be loaded{offline}: {_first_line(error)}"
        raise UserError(Problem(flag, found)) from None
    return _from_dataset(f"{name}[{split}]", dataset)


def _from_dataset(name: str, dataset: Any) -> Source:
    def rows(needed: list[str]) -> Iterator[Row]:
        yield from enumerate(dataset.select_columns(needed), start=1)

    # Not the library's own fingerprint: that one depends on paths and times, and differs between machines.
    files = [Path(entry["filename"]) for entry in dataset.cache_files]
    return Source(name, _digest(files, dataset.split, len(dataset)), dataset.column_names, rows, len(dataset))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def choose_fields(source: Source, columns: Mapping[str, str], may_lack: bool = False) -> dict[str, str]:
    """Which column gives each of our fields: ``{"prompt": "question", "completion": "answer"}``.

    ``columns`` is the recipe's ``dataset_columns`` (theirs to ours). Where several formats are complete, one that it
    names goes first, then messages, prompt with completion, text. ``may_lack``: the columns were named for another
    data set; where this one has a complete format without those it lacks, it takes that. Raises ``UserError``.
    """
    if not source.columns:
        bad = [row for _, row in source.rows([]) if isinstance(row, Problem)]
        raise UserError(*(shown(bad, source.name) or [Problem(source.name, "no rows", "at least one")]))
    if may_lack:
        present = {theirs: ours for theirs, ours in columns.items() if theirs in source.columns}
        if any(set(present.values()) <= set(fields) for fields in _complete(source, present)):
            columns = present
    problems = []
    for theirs, ours in columns.items():
        where = f"dataset_columns {theirs}={ours}"
        if ours not in FIELDS:
            problems.append(Problem(where, f"{ours!r} is no field", ", ".join(FIELDS), did_you_mean(ours, FIELDS)))
        elif list(columns.values()).count(ours) > 1:
            problems.append(Problem(where, f"{ours} is given twice", "one column for each field"))
        if theirs not in source.columns:
            found = f"{source.name} has no column {theirs!r}"
            hint = did_you_mean(theirs, source.columns)
            problems.append(Problem(where, found, "one of " + ", ".join(source.columns), hint))
    if problems:
        raise UserError(*problems)
    complete = _complete(source, columns)
    if not complete:
        expected = "messages, or prompt and completion, or text"
        fix = "say which column is which: --dataset_columns theirs=ours,theirs=ours"
        raise UserError(Problem(source.name, f"columns {', '.join(source.columns)}", expected, fix))
    return complete[0]


def _complete(source: Source, columns: Mapping[str, str]) -> list[dict[str, str]]:
    """Our field to their column for each format that ``source`` has, best first."""
    theirs_of = {name: name for name in source.columns if name in FIELDS and name not in columns}
    theirs_of |= {ours: theirs for theirs, ours in columns.items()}
    complete = [fields for fields in FORMATS if all(field in theirs_of for field in fields)]
    complete.sort(key=lambda fields: not any(field in columns.values() for field in fields))
    return [{field: theirs_of[field] for field in fields} for fields in complete]


def shown(problems: list[Problem], name: str) -> list[Problem]:
    """The first few problems and the number of the others."""
    more = len(problems) - NUM_SHOWN
    return problems[:NUM_SHOWN] + ([Problem(name, f"... and {more} more problems")] if more > 0 else [])


def read_samples(source: Source, fields: Mapping[str, str]) -> Iterator[tuple[int, Any]]:
    """Each row's number, and a sample in our fields, a list of its ``Problem``s, or None for a blank line.

    Raises ``UserError`` where the source cannot be read any further.
    """
    for number, row in _readable(source, list(fields.values())):
        if row is None:
            yield number, None
        elif isinstance(row, Problem):
            yield number, [row]
        elif missing := [theirs for theirs in fields.values() if theirs not in row]:
            found = f"no {' and no '.join(map(repr, missing))} (it has {', '.join(row) or 'nothing'})"
            yield number, [Problem(source.place(number), found, " and ".join(fields.values()) + " in every row")]
        else:
            sample = {ours: row[theirs] for ours, theirs in fields.items()}
            problems = check_sample(sample)
            yield number, [replace(p, where=f"{source.place(number)} {p.where}") for p in problems] or sample


def _readable(source: Source, needed: list[str]) -> Iterator[Row]:
    try:
        yield from source.rows(needed)
    except Exception as error:  # whatever the libraries make of a damaged file; a bad line is no exception
        raise UserError(Problem(source.name, f"damaged or unreadable ({_first_line(error)})")) from None


def check_sample(sample: Mapping[str, Any]) -> list[Problem]:
    """Problems of a sample in our columns; ``where`` is the field, such as ``messages[2].role``."""
    if "messages" in sample:
        return _check_messages("messages", sample["messages"], needs_answer=True)
    if "text" in sample:
        return _check_text("text", sample["text"])
    prompt, completion = sample.get("prompt"), sample.get("completion")
    if isinstance(prompt, list) != isinstance(completion, list):
        found = f"prompt is a {type(prompt).__name__}, completion a {type(completion).__name__}"
        return [Problem("prompt", found, "two texts, or two lists of messages")]
    if isinstance(prompt, list):
        return _check_messages("prompt", prompt, False) + _check_messages("completion", completion, True)
    return _check_text("prompt", prompt) + _check_text("completion", completion)


def _check_text(where: str, value: Any) -> list[Problem]:
    if value is None:
        return [Problem(where, "missing", "text")]
    if not isinstance(value, str):
        return [Problem(where, f"a {type(value).__name__}", "text")]
    if not value.strip():
        return [Problem(where, "empty", "text")]
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return [Problem(where, f"half of a surrogate pair at character {error.start}", "valid Unicode")]
    return []


def _check_messages(where: str, messages: Any, needs_answer: bool) -> list[Problem]:
    if not isinstance(messages, list):
        return [Problem(where, f"a {type(messages).__name__}", "a list of messages")]
    if not messages:
        return [Problem(where, "empty", "a list of messages")]
    problems: list[Problem] = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            problems.append(Problem(f"{where}[{i}]", f"a {type(message).__name__}", "an object with role and content"))
            continue
        role = message.get("role")
        if role not in ROLES:
            found = "missing" if role is None else f"found {role!r}"
            problems.append(Problem(f"{where}[{i}].role", found, ", ".join(ROLES), did_you_mean(str(role), ROLES)))
        problems += _check_text(f"{where}[{i}].content", message.get("content"))
    if needs_answer and not problems and all(message["role"] != "assistant" for message in messages):
        problems.append(Problem(where, "no assistant turn", "at least one: nothing else is learned"))
    return problems

"""Finds the dataset of a name: files, a folder, a remote URL, or a dataset of the hub.

Promises:

- If nothing has that name, or it cannot be read, the message says what exists instead.
- Nothing is unpickled, executed or unpacked to disk; archives are refused.
- The digest depends on the content, not on the path.
- Files in a folder that are not data files are counted, so that nothing is left out unseen.
"""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from kit.data.read.blocks import (
    JSON_SUFFIXES,
    ArrayFile,
    Block,
    CellFile,
    JsonFile,
    Part,
    TextFile,
    begins_array,
)
from kit.data.read.cells import DELIMITERS
from kit.data.read.compressed import DECOMPRESSORS, split_name
from kit.data.read.hub_datasets import Found, open_hub
from kit.data.read.remote import fetch
from kit.data.read.stores import is_url
from kit.data.read.tables import TableFile
from kit.system.cache import digest as digest_of
from kit.system.cache import file_digest, file_stamp
from kit.system.errors import Problem, Problems, UserError, did_you_mean, did_you_mean_path

SUFFIXES = [*JSON_SUFFIXES, *DELIMITERS, ".txt", ".parquet", ".arrow"]
KNOWN = f"{', '.join(SUFFIXES)}; text may be compressed ({', '.join(DECOMPRESSORS)})"
# Files that ``datasets`` writes next to the data; they hold no rows.
NOT_DATA = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")
SPLITS = ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
FIX_ROWS = "fix or remove such rows"
FIX = f"{FIX_ROWS}, or leave them out with --on_bad_row skip"
# A tenth: single damaged rows are far fewer, and rows that a mapping or a format does not fit are usually far more.
MAX_SKIPPED_FRACTION = 0.1
ARCHIVES = (".zip", ".tar", ".tgz", ".rar", ".7z")
NOT_OF_HUB = {
    "split": "give a whole split: --max_train_samples takes the first rows, max_samples in an entry draws some",
    "revision": "leave it out: in a list of datasets, `revision` may stand in the entry of a hub id",
}
NUM_SHOWN = 10
MAX_BAD_ROWS = 10_000  # bad rows before the first good one that end the search for it
SAMPLED_BYTES = 1 << 14  # of each piece that ``_sampled_digest`` reads
NUM_PIECES = 256  # of all files together, but at least two of each


@dataclass(frozen=True)
class Source:
    """A dataset that was found: its rows are those of its parts, one part after another."""

    name: str  # as the user wrote it; for a dataset of the hub with its split
    digest: str  # identifies the content, whatever its path
    first_row: dict[str, Any]  # the first good one
    parts: tuple[Part, ...]
    stamps: tuple[tuple[Path, list[int]], ...] = ()  # each file with its stamp from before its digest was computed
    notes: tuple[str, ...] = ()  # files of a folder that are not read, for the user
    commit: str | None = None  # of a dataset of the hub

    @property
    def columns(self) -> list[str]:
        """The names of the columns of the first row."""
        return list(self.first_row)

    def changed(self) -> list[Path]:
        """The files that were changed or removed since ``digest`` was computed."""
        return [path for path, stamp in self.stamps if not path.is_file() or file_stamp(path) != stamp]

    def origin(self, part: int, number: int) -> str:
        """Name line or row ``number`` of part number ``part``: ``train.jsonl:17``, ``train.parquet row 17``."""
        return self.parts[part].origin(number)


def open_source(
    name: str,
    split: str,
    flag: str,
    config: str | None = None,
    streaming: bool = False,
    revision: str | None = None,
) -> Source:
    """Open the dataset that ``name`` stands for, which may be

    - a file with a known suffix;
    - a folder: all files with a known suffix in and below it; of one that ``save_to_disk`` wrote with several splits,
      those of ``split``. If every file, or its folder, is named after a split (``train/0.jsonl``,
      ``data/train-00000.parquet``), only those of ``split``. If only some are, the folder is refused;
    - a pattern such as ``data/*.jsonl``, with ``**`` for any folders: the files that match it;
    - a remote URL that fsspec can open (``s3://bucket/data/*.jsonl``), of any of these: it is copied to the cache;
    - a hub id, with its ``config``. ``revision`` is its branch, tag or commit.

    ``split`` of a hub id may be a slice such as ``train[:10%]``.

    Files are sorted by path. ``flag`` is the recipe's key, for messages. With ``streaming`` a dataset of the hub is
    downloaded while it is used, and the digest of local files covers their names, their sizes and pieces of their
    content.

    Raises ``UserError`` if nothing is found, or if what is found cannot be read or has no usable row.
    """
    notes: list[str] = []
    by_sample = streaming and not is_url(name)  # a copy is hashed in no time
    try:
        found_at = fetch(name, flag) if is_url(name) else Path(os.path.expanduser(name))
        if isinstance(found_at, Path):
            files = _find_files(name, found_at, split.partition("[")[0], flag, notes)
        else:
            files = found_at
        if files and (option := "split" if "[" in split else "revision" if revision else ""):
            value = split if option == "split" else revision
            raise UserError(f"{flag}_{option}", f"{value!r}, but {name!r} is not a hub id", fix=NOT_OF_HUB[option])
        if files:
            opened = Found(name, *_parts(files, flag))
        else:
            opened = open_hub(name, split, flag, config, streaming, revision)
        stamps = tuple((file, file_stamp(file)) for file in opened.files)
        if by_sample:
            num_pieces = max(2, NUM_PIECES // max(1, len(opened.files)))
            contents = [_sampled_digest(file, num_pieces) for file in opened.files]
        else:
            contents = [file_digest(file) for file in opened.files]
    except OSError as error:
        raise UserError(flag, f"{name!r} cannot be read ({error.strerror or error})") from None
    digest = digest_of(contents, opened.marks)
    first_row = _first_row(opened.name, opened.parts)
    return Source(opened.name, digest, first_row, tuple(opened.parts), stamps, tuple(notes), opened.commit)


def _sampled_digest(path: Path, num_pieces: int) -> str:
    """A digest of the size of a file and of pieces spread evenly over it: streamed files are not read whole."""
    size = path.stat().st_size
    state = xxhash.xxh3_64(str(size).encode())
    with path.open("rb") as file:
        for k in range(num_pieces):
            file.seek(max(0, size - SAMPLED_BYTES) * k // (num_pieces - 1))
            state.update(file.read(SAMPLED_BYTES))
    return state.hexdigest()


def hub_id(name: str, split: str, flag: str) -> str | None:
    """Return the hub id that ``name`` stands for; None for a path. Reads no file.

    Raises ``UserError`` if ``name`` is neither. ``flag`` is the recipe's key, for messages.
    """
    is_found = is_url(name) or _find_files(name, Path(os.path.expanduser(name)), split, flag, [])
    return None if is_found else name


def _find_files(name: str, path: Path, split: str, flag: str, notes: list[str]) -> dict[str, Path]:
    """The files that ``name`` stands for, each under the name to show. Empty if ``name`` can only be a hub id.

    Adds the files of a folder that are not read to ``notes``. Raises ``UserError`` if there are no such files.
    """
    if path.is_file():
        return {name: path}
    if path.is_dir():
        return _in_folder(name.rstrip("/"), path, split, flag, notes)
    if path.exists():
        raise UserError(flag, f"{name!r} is neither a file nor a folder", "a file that can be read twice")
    if re.search(r"[*?\[]", name):
        matches = [match for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]
        if matches:
            return {match: Path(match) for match in matches}
    elif HUB_ID.fullmatch(name) and split_name(name)[0] not in SUFFIXES:
        return {}
    while re.search(r"[*?\[]", str(path.parent)):
        path = path.parent
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    found = f"no file or folder {name!r}" + ("" if path.parent.is_dir() else f", nor a folder {str(path.parent)!r}")
    expected = f"a file ({KNOWN}), a folder, a glob, a remote URL, or a hub id"
    fix = did_you_mean_path(str(path), siblings)
    raise UserError(flag, found, expected, fix)


def _in_folder(name: str, path: Path, split: str, flag: str, notes: list[str]) -> dict[str, Path]:
    """The data files in and below a folder, each under the name to show; only those of ``split`` if all name one."""
    files, others = _data_files(path)
    if not files:
        found = f"{name!r} is a folder without data files" + (f" ({_endings(others)})" if others else "")
        raise UserError(flag, found, f"a folder with files that end in {KNOWN}")
    if others:
        notes.append(f"{name}: {len(others)} files are not read as rows: {_endings(others)}")
    if (path / "dataset_dict.json").is_file():  # save_to_disk writes each split into a folder
        split_of = {relative: relative.parts[0].lower() for relative in files}
    else:
        words = re.compile(rf"(?<![a-z])({'|'.join(map(re.escape, (split.lower(), *SPLITS)))})(?![a-z])")
        matches = {relative: words.search(relative.as_posix().lower()) for relative in files}
        split_of = {relative: match[1] for relative, match in matches.items() if match}
    unnamed = [relative for relative in files if relative not in split_of]
    if split_of and unnamed:
        found = f"{name!r} has files named after a split ({next(iter(split_of))}, ...) and others ({unnamed[0]}, ...)"
        fix = "name those that you mean by a glob, or sort them into folders such as train and test"
        raise UserError(flag, found, "all of them named so, or none", fix)
    chosen = unnamed or [relative for relative, word in split_of.items() if word == split.lower()]
    if not chosen:
        splits = list(dict.fromkeys(split_of.values()))
        found, hint = f"{name} has no split {split!r}", did_you_mean(split, splits)
        raise UserError(f"{flag}_split", found, ", ".join(splits), hint)
    _check_saved(name, chosen, flag)
    for relative in chosen:
        if _leaves(files[relative], path):
            found = f"{name}/{relative} is a link to {os.path.realpath(files[relative])}, which is not in this folder"
            fix = "name the files by a glob, which follows links; or replace the links by copies"
            raise UserError(flag, found, "files in it: the run reads no others", fix)
    return {f"{name}/{relative.as_posix()}": files[relative] for relative in chosen}


def _check_saved(name: str, chosen: list[Path], flag: str) -> None:
    """Raise ``UserError`` if some files of a save of ``datasets`` are lost, or those of an earlier save are left.

    Their names say how many the save wrote. Rows would be left out, or trained on twice.
    """
    totals: dict[str, list[int]] = {}
    for relative in chosen:
        if of := re.fullmatch(r"(.*-)\d{5}-of-(\d{5})\.arrow", relative.as_posix()):
            totals.setdefault(of[1], []).append(int(of[2]))
    for beginning, numbers in totals.items():
        if set(numbers) != {len(numbers)}:
            saves = " and ".join(f"a save of {number}" for number in sorted(set(numbers)))
            found = f"{name} has {len(numbers)} files {beginning}*.arrow, of {saves}"
            fix = "save or copy it to a new folder; or name the files that you mean by a glob"
            raise UserError(flag, found, "all files of one save", fix)


def _leaves(file: Path, folder: Path) -> bool:
    """Whether a file in a folder is a link, or reached by one, to a file outside it. Not in the hub's cache."""
    folder = Path(os.path.realpath(folder))  # it may be a link into the hub's cache
    inside = [str(folder)]
    # The hub's cache: datasets--owner--name/snapshots/COMMIT has links to datasets--owner--name/blobs.
    inside += [str(parent.parent / "blobs") for parent in folder.parents if parent.name == "snapshots"]
    target = os.path.realpath(file)
    return not any(target.startswith(f"{root.rstrip('/')}/") for root in inside)


def _data_files(path: Path) -> tuple[dict[Path, Path], list[Path]]:
    """The data files in and below a folder by their path in it, and the other files. Hidden files are neither."""
    files = {}
    others = []
    for file in sorted(_walk(path)):
        relative = file.relative_to(path)
        if relative.name in NOT_DATA or any(part.startswith(".") for part in relative.parts):
            continue
        is_kept_result = re.fullmatch(r"cache-.*\.arrow", relative.name)  # of a function that ``datasets`` has mapped
        if split_name(relative.name)[0] in SUFFIXES and file.is_file() and not is_kept_result:  # or a link to nothing
            files[relative] = file
        else:
            others.append(relative)
    # Beside other data files a .txt file is usually a README.
    if chosen := {each: file for each, file in files.items() if split_name(file.name)[0] != ".txt"}:
        others += [each for each in files if each not in chosen]
    return chosen or files, others


def _endings(files: Sequence[Path]) -> str:
    """How many files have each ending: ``.md (1), .pdf (3)``."""
    endings = Counter(file.suffix.lower() or "no ending" for file in files)
    return ", ".join(f"{ending} ({count})" for ending, count in sorted(endings.items()))


def _walk(path: Path) -> Iterator[Path]:
    """All files in and below a folder. Follows links to folders, but visits no folder twice."""
    seen = set()
    for folder, folders, names in os.walk(path, followlinks=True):
        if os.path.realpath(folder) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(folder))
        yield from (Path(folder, name) for name in names)


def _parts(files: dict[str, Path], flag: str) -> tuple[list[Part], list[Path], list[Any]]:
    """The part for each file; the files; and what else of them goes into the digest."""
    problems = Problems()
    parts: list[Part] = []
    for shown_name, path in files.items():
        with problems.caught():
            parts.append(_part(shown_name, path, flag))
    problems.raise_if_any()
    paths = list(files.values())
    return (
        parts,
        paths,
        [split_name(path.name) for path in paths],
    )  # the same bytes give other rows under other suffixes


def _part(name: str, path: Path, flag: str) -> Part:
    """The part for a file. Raises ``UserError`` if its suffix is not known."""
    suffix, ending = split_name(path.name)[0], path.suffix.lower()
    if suffix in JSON_SUFFIXES:
        return ArrayFile(name, str(path)) if begins_array(str(path)) else JsonFile(name, str(path))
    if suffix in DELIMITERS:
        return CellFile(name, str(path), DELIMITERS[suffix])
    if suffix == ".txt":
        return TextFile(name, str(path))
    if ending in (".parquet", ".arrow"):
        return TableFile(name, str(path))
    fix = "unpack it, and give the folder" if {ending, suffix} & set(ARCHIVES) else ""
    raise UserError(flag, f"{name!r} ends in {ending!r}", KNOWN, fix)


def read_blocks(parts: Sequence[Part], columns: list[str] | None = None) -> Iterator[tuple[int, Block]]:
    """All blocks of the parts, each with the index of its part; of them the ``columns``, None for all."""
    for i, part in enumerate(parts):
        for block in part.blocks(columns):
            yield i, block


def read_rows(parts: Sequence[Part], columns: list[str] | None = None) -> Iterator[tuple[int, int, Any]]:
    """All rows of the parts: index of the part, number of the row, and its content as ``Part.rows`` gives it.

    ``columns`` are the columns needed, None for all.
    """
    for i, block in read_blocks(parts, columns):
        for number, row in parts[i].rows(block):
            yield i, number, row


def _first_row(name: str, parts: Sequence[Part]) -> dict[str, Any]:
    """The first good row. Raises ``UserError`` with the problems of the rows if none is good."""
    bad: list[Problem] = []
    for _, _, row in read_rows(parts):
        if isinstance(row, Problem):
            bad.append(row)
        elif row:
            return dict(row)
        if len(bad) == MAX_BAD_ROWS:
            break
    if not bad:
        raise UserError(name, "no rows", "at least one")
    raise UserError(*shown(bad, name, FIX_ROWS))


def shown(problems: Sequence[Problem], name: str, fix: str) -> list[Problem]:
    """The first ``NUM_SHOWN`` problems, and one that counts the others.

    Args:
        name: the source's.
        fix: the advice for bad rows, which is given only once: to the last of the problems without advice of its own.
    """
    first = list(problems[:NUM_SHOWN])
    without = [i for i, problem in enumerate(first) if not problem.fix]
    if num_more := len(problems) - len(first):
        text = f"... and {num_more} more problem{'s' if num_more > 1 else ''}"
        first.append(Problem(name, text, fix=fix if without else "", num_others=num_more))
    elif without:
        first[without[-1]] = replace(first[without[-1]], fix=fix)
    return first

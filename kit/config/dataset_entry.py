"""One entry of a list of datasets in a recipe. Plain Python, PyYAML and pydantic."""

import json
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, StringConstraints

from kit.config.prompt_format import FORM, checked_format
from kit.schema.fields import FRACTION_OR_COUNT, SERVER, column_mapping, fraction_or_count, option

DATA_SUFFIXES = tuple(
    f".{kind}{packed}"
    for kind in "jsonl ndjson json csv tsv txt parquet arrow".split()
    for packed in ("", ".gz", ".bz2", ".xz", ".zst")
)

_data = partial(option, "Data")


class DatasetEntry(BaseModel):
    """One entry of a list of datasets in a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, str_strip_whitespace=True)

    path: str = _data(..., "file, glob, folder or hub id", min_length=1)
    name: str = _data("", "in metrics and tables; default: the file's stem, or the hub id")
    config: str | None = _data(None, "config of a hub id")
    split: str | None = _data(None, "split of a hub id or a folder with splits")
    revision: str | None = _data(None, "branch, tag or commit of a hub id")
    columns: Annotated[dict[str, str] | None, BeforeValidator(column_mapping)] = _data(
        None, "column mapping", expected="column=field, separated by commas, each column once"
    )
    prompt_format: Annotated[str, StringConstraints(strip_whitespace=False), AfterValidator(checked_format)] | None = (
        _data(
            None, "prompt of rows with instruction and input; default: both, with a blank line between", expected=FORM
        )
    )
    max_samples: Annotated[float, AfterValidator(fraction_or_count)] | None = _data(
        None,
        "number of rows to use, drawn by seed; a value below 1 is a fraction",
        "rows",
        gt=0,
        expected=FRACTION_OR_COUNT,
    )
    weight: float | None = _data(
        None, "sampling weight: fraction of each epoch drawn from this dataset, relative to the other weights", ge=0
    )
    teacher: str | None = _data(None, "distil: its own teacher, with teacher_top_k; default: that of the run")
    teacher_server: str | None = _data(None, "distil: vLLM server with its own teacher", **SERVER)

    def filled(
        self, config: str | None, split: str, columns: dict[str, str], revision: str | None = None
    ) -> "DatasetEntry":
        """Return this entry with the values of the recipe where it has none of its own."""
        values = {
            "name": self.name or self._default_name(),
            "config": self.config or config,
            "split": self.split or split,
            "revision": self.revision or revision,
            "columns": columns if self.columns is None else self.columns,
        }
        return self.model_copy(update=values)

    def as_written(self) -> dict[str, Any]:
        """Return what is set, as a user writes it: ``max_samples: 200``, and not 200.0."""
        given = {key: value for key, value in self.model_dump().items() if value not in (None, "")}
        return {key: without_point(value) for key, value in given.items()}

    def _default_name(self) -> str:
        """The stem of a file, the first part of a pattern, the name of a folder, or a hub id as it is."""
        path = Path(os.path.abspath(os.path.expanduser(self.path)))
        beginning = re.split(r"[*?\[]", path.name)[0]
        is_pattern = beginning != path.name
        is_stem = is_pattern or path.name.lower().endswith(DATA_SUFFIXES)
        word = beginning.strip("-_.").split(".")[0] if is_stem else ""
        if not word and (is_pattern or "://" in self.path or os.path.isdir(path)):
            while re.search(r"[*?\[]", path.name):
                path = path.parent
            word = path.name
        return word or self.path


def without_point(value: Any) -> Any:
    """Return a whole number of a dataset as an ``int``; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def in_one_line(value: Any) -> str:
    """Return a value as YAML in a single line of any length: a line break would end a recipe's line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    text = text.removesuffix("...\n").strip()
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text


def with_own_names(entries: Sequence[DatasetEntry]) -> list[DatasetEntry]:
    """Return the entries with unique names: equal names get their position in the list appended."""
    names = [entry.filled(None, "", {}).name for entry in entries]
    own = [name if names.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(names, start=1)]
    return [
        entry if name == one else entry.model_copy(update={"name": one})
        for entry, name, one in zip(entries, names, own, strict=True)
    ]

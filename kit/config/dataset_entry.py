"""One entry of a list of data sets in a recipe. Plain Python and pydantic."""

import os
import re
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

from kit.config.fields import column_mapping, option

DATA_SUFFIXES = tuple(
    f".{kind}{packed}"
    for kind in "jsonl ndjson json csv tsv txt parquet arrow zip tar tgz tbz2 txz tzst".split()
    for packed in ("", ".gz", ".bz2", ".xz", ".zst")
)

_data = partial(option, "Data")


class DatasetEntry(BaseModel):
    """One entry of a list of data sets in a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, str_strip_whitespace=True)

    path: str = _data(..., "file, glob, folder or hub id", min_length=1)
    name: str = _data("", "in metrics and tables; default: the file's stem, or the hub id")
    config: str | None = _data(None, "config of a hub id")
    split: str | None = _data(None, "split of a hub id or a folder with splits")
    revision: str | None = _data(None, "branch, tag or commit of a hub id")
    columns: Annotated[dict[str, str] | None, BeforeValidator(column_mapping)] = _data(
        None, "names of columns", expected="column=field, separated by commas, each column once"
    )
    weight: float | None = _data(None, "share of the training data, relative to the other weights", ge=0)

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

    def _default_name(self) -> str:
        """The stem of a file, the first part of a pattern, the name of a folder, or a hub id as it is."""
        path = Path(os.path.abspath(os.path.expanduser(self.path)))
        beginning = re.split(r"[*?\[]", path.name)[0]
        is_pattern = beginning != path.name
        is_stem = is_pattern or path.name.lower().endswith(DATA_SUFFIXES)
        word = beginning.strip("-_.").split(".")[0] if is_stem else ""
        if not word and (is_pattern or os.path.isdir(path)):
            while re.search(r"[*?\[]", path.name):
                path = path.parent
            word = path.name
        return word or self.path

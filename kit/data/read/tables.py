"""Rows of tables: parquet files, Arrow files, and datasets of ``datasets``. A block stays Arrow until it is parsed.

The promises of ``kit.data.read.blocks`` hold here too.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from kit.data.read.blocks import BLOCK_ROWS, Block, Part
from kit.data.read.compressed import split_name, type_and_message
from kit.data.read.text import Ending, Row
from kit.system.errors import Problem

MAX_BLOCK_BYTES = 1 << 28  # of a block in memory; ordinary ones have some megabytes


@dataclass(frozen=True)
class _Table(Part):
    has_schema: ClassVar[bool] = True
    has_lines: ClassVar[bool] = False

    def class_names(self, column: str) -> list[str]:
        """See ``Part``."""
        with suppress(Exception):  # of a damaged file, which its rows report
            return _class_names(next(iter(self._tables([column]))).schema)[column]
        return []

    def _read(self, columns: list[str] | None) -> Iterator[Block]:
        first = 1
        for table in self._tables(columns):
            for start in range(0, table.num_rows, BLOCK_ROWS):
                block = _block(table.slice(start, BLOCK_ROWS), first)
                first += block.num_rows
                yield block

    def _tables(self, columns: list[str] | None) -> Iterator[Any]:
        """Yield Arrow tables or record batches, each of any number of rows, with ``columns`` only (None: all)."""
        raise NotImplementedError

    def _parse(self, payload: bytes, first: int) -> Iterator[Row]:
        import pyarrow

        table = pyarrow.ipc.open_stream(payload).read_all()
        names = table.column_names
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            found = f"two columns are called {twice[0]!r}"
            return iter([(first, Ending(self.name, found, "columns with different names"))])
        try:
            rows = _to_dicts(table)
        except Exception:  # a value that Python cannot represent, or text that is not valid UTF-8
            rows = [_to_dict_or_problem(table.slice(i, 1), f"{self.name} row {first + i}") for i in range(len(table))]
        return enumerate(rows, first)


@dataclass(frozen=True)
class TableFile(_Table):
    """A parquet file, or an Arrow file in either of its formats (IPC file, IPC stream)."""

    path: str

    def _tables(self, columns: list[str] | None) -> Iterator[Any]:
        import pyarrow
        from pyarrow import ipc, parquet

        # Not memory-mapped: if the file shrinks meanwhile, that would kill the process.
        with pyarrow.OSFile(self.path) as file:
            if split_name(self.path)[0] == ".parquet":
                with parquet.ParquetFile(file) as table:
                    present = _present(columns, table.schema_arrow.names)
                    yield from table.iter_batches(_rows_at_a_time(table.metadata), columns=present)
                return
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            if is_file:
                reader = ipc.open_file(file)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                batches = iter(ipc.open_stream(file))
            for batch in batches:
                present = _present(columns, batch.schema.names)
                yield batch if present is None else batch.select(present)


@dataclass(frozen=True)
class Shard(_Table):
    """A dataset of ``datasets``, or one shard of a streaming dataset."""

    dataset: Any

    def _tables(self, columns: list[str] | None) -> Iterator[Any]:
        names = self.dataset.column_names
        dataset = self.dataset.with_format("arrow")
        if columns is not None and names is not None:
            dataset = dataset.select_columns(_present(columns, names))
        return dataset.iter(BLOCK_ROWS)


def _rows_at_a_time(metadata: Any) -> int:
    """How many rows of a parquet file are read at a time: fewer where they are long."""
    num_bytes = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return max(1, min(BLOCK_ROWS, MAX_BLOCK_BYTES * metadata.num_rows // max(num_bytes, 1)))


def _present(columns: list[str] | None, names: list[str]) -> list[str] | None:
    """Those of ``columns`` that are in ``names``; None for all."""
    if columns is None:
        return None
    return [column for column in columns if column in names]


def _block(table: Any, first: int) -> Block:
    """A slice of a table as a block that begins with row ``first``."""
    import pyarrow

    stream = pyarrow.BufferOutputStream()  # pickling the slice itself would include the whole table
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write(table)
    return Block(first, table.num_rows, stream.getvalue().to_pybytes())


def _to_dict_or_problem(row: Any, where: str) -> Any:
    """A table of one row as a dict, or as a ``Problem`` if Python cannot hold its values."""
    try:
        return _to_dicts(row)[0]
    except Exception as error:
        return Problem(where, f"cannot be read ({type_and_message(error)})")


def _to_dicts(table: Any) -> list[dict[str, Any]]:
    """The rows of an Arrow table, with nested values as they were before Arrow, and the names of classes."""
    from pyarrow import types

    columns = [column.to_pylist() for column in table.columns]  # twice as fast as table.to_pylist()
    classes = _class_names(table.schema)
    for i, kind in enumerate(table.schema.types):
        if types.is_nested(kind):
            columns[i] = [_without_nulls(value) for value in columns[i]]
        if "arrow.json" in str(kind):
            columns[i] = [_parse_json(value, kind) for value in columns[i]]
        if names := classes.get(table.column_names[i]):
            columns[i] = [_named(value, names) for value in columns[i]]
    if not columns:
        return [{} for _ in range(table.num_rows)]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _class_names(schema: Any) -> dict[str, list[str]]:
    """The names of the classes of each column that ``datasets`` has marked as ``ClassLabel``, or as a list of them."""
    found = {}
    with suppress(Exception):  # other metadata, or none
        for column, feature in json.loads(schema.metadata[b"huggingface"])["info"]["features"].items():
            kind = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
            if isinstance(kind, dict) and kind.get("_type") == "ClassLabel":
                found[column] = kind["names"]
    return found


def _named(value: Any, names: list[str]) -> Any:
    """The name of a class, or of each of a list; null for a number without one: ``datasets`` writes -1 for no class."""
    if isinstance(value, list):
        return [_named(each, names) for each in value]
    if not isinstance(value, int):  # the column was changed after ``datasets`` had described it
        return value
    return names[value] if 0 <= value < len(names) else None


def _without_nulls(value: Any) -> Any:
    """Remove keys that are null: in Arrow all objects of a column have the same keys, absent ones filled with null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _parse_json(value: Any, kind: Any) -> Any:
    """Parse the parts of ``value`` that Arrow type ``kind`` marks as JSON text: ``datasets`` stores mixed types so."""
    from pyarrow import types

    if value is None:
        return None
    if types.is_struct(kind):
        return {field.name: _parse_json(value[field.name], field.type) for field in kind if field.name in value}
    if types.is_list(kind) or types.is_large_list(kind):
        return [_parse_json(item, kind.value_type) for item in value]
    return json.loads(value) if str(kind).startswith("extension<arrow.json") else value

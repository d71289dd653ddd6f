"""Rows of tables: parquet files, Arrow files, and data sets of ``datasets``. A block stays Arrow until it is parsed.

The promises of ``kit.data.read.parts`` hold here too, with one exception: a parquet or Arrow file that is
compressed as a whole (``.parquet.gz``) is read into memory as a whole.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from kit.data.read.compressed import Location, open_location, split_name, type_and_message
from kit.data.read.parts import BLOCK_ROWS, Block, to_the_end
from kit.data.read.text import Ending, Row
from kit.errors import Problem, UserError

MAX_BLOCK_BYTES = 1 << 28  # of a block in memory; ordinary ones have some megabytes
FEW_ROWS = 20  # read at a time where a thousand could be too much
MAX_RATIO = 1000  # of uncompressed to compressed bytes; text has about 5


@dataclass(frozen=True)
class _Table:
    unit: ClassVar[str] = " rows"
    has_schema: ClassVar[bool] = True
    has_lines: ClassVar[bool] = False
    name: str

    @to_the_end
    def blocks(self, columns: list[str] | None = None) -> Iterator[Block]:
        first = 1
        for table in self._tables(columns):
            num_rows = _rows_of_block(table)
            for start in range(0, table.num_rows, num_rows):
                block = _block(table.slice(start, num_rows), first)
                first += block.num_rows
                yield block

    def _tables(self, columns: list[str] | None) -> Iterator[Any]:
        """Yield Arrow tables or record batches, each of any number of rows, with ``columns`` only (None: all)."""
        raise NotImplementedError

    def rows(self, block: Block) -> Iterator[Row]:
        if isinstance(block.payload, list):
            return iter(block.payload)
        import pyarrow

        table = pyarrow.ipc.open_stream(block.payload).read_all()
        names = table.column_names
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            found = f"two columns are called {twice[0]!r}"
            return iter([(block.first, Ending(self.name, found, "columns with different names"))])
        try:
            rows = _to_dicts(table)
        except Exception:  # a value that Python cannot represent, or text that is not valid UTF-8
            rows = [
                _to_dict_or_problem(table.slice(i, 1), f"{self.name} row {block.first + i}") for i in range(len(table))
            ]
        return enumerate(rows, block.first)


@dataclass(frozen=True)
class TableFile(_Table):
    """A parquet file, or an Arrow file in either of its formats (IPC file, IPC stream). ``size``: rows, if known."""

    location: Location
    size: int | None = None

    def _tables(self, columns: list[str] | None) -> Iterator[Any]:
        from pyarrow import ipc, parquet

        with _as_arrow(self.location) as file:
            if self.location.suffix == ".parquet":
                with parquet.ParquetFile(file) as table:
                    present = _present(columns, table.schema_arrow.names)
                    yield from _batches(table, present)
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
    """A data set of ``datasets``, or one shard of a streaming data set. ``size``: rows, if known."""

    dataset: Any
    size: int | None = None

    def _tables(self, columns: list[str] | None) -> Iterator[Any]:
        names = self.dataset.column_names
        dataset = self.dataset.with_format("arrow")
        if columns is not None and names is not None:
            dataset = dataset.select_columns(_present(columns, names))
        return dataset.iter(BLOCK_ROWS)


def _batches(file: Any, columns: list[str] | None) -> Iterator[Any]:
    """The rows of a parquet file as tables of ``BLOCK_ROWS``, or of fewer with more than ``MAX_BLOCK_BYTES``.

    A value that is stored once for many rows, in a dictionary, is in memory once for each row that is read at a time.
    So few are read at a time where that could be much.
    """
    import pyarrow

    if _largest_chunk(file) * BLOCK_ROWS <= MAX_BLOCK_BYTES:
        yield from file.iter_batches(BLOCK_ROWS, columns=columns)
        return
    batches: list[Any] = []
    num_rows = num_bytes = 0
    for batch in file.iter_batches(FEW_ROWS, columns=columns):
        batches.append(batch)
        num_rows += batch.num_rows
        num_bytes += batch.nbytes
        if num_rows >= BLOCK_ROWS or num_bytes > MAX_BLOCK_BYTES:
            yield pyarrow.Table.from_batches(batches)
            batches, num_rows, num_bytes = [], 0, 0
    if batches:
        yield pyarrow.Table.from_batches(batches)


def _chunks(file: Any) -> Iterator[Any]:
    """What the footer of a parquet file says about each column of each group of rows."""
    metadata = file.metadata
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        yield from (group.column(j) for j in range(group.num_columns))


def _largest_chunk(file: Any) -> int:
    return max((chunk.total_uncompressed_size for chunk in _chunks(file)), default=0)


def _rows_of_block(table: Any) -> int:
    """How many rows a block of ``table`` may have: fewer if a value of a dictionary, which many rows share, is long."""
    from pyarrow import compute, types

    longest = 0
    for column in table.columns:
        kind = column.type
        if types.is_dictionary(kind) and (types.is_string(kind.value_type) or types.is_large_string(kind.value_type)):
            for array in getattr(column, "chunks", [column]):
                longest = max(longest, compute.max(compute.binary_length(array.dictionary)).as_py() or 0)
    return max(1, min(BLOCK_ROWS, MAX_BLOCK_BYTES // max(longest, 1)))


def _present(columns: list[str] | None, names: list[str]) -> list[str] | None:
    """Those of ``columns`` that are in ``names``; None for all."""
    if columns is None:
        return None
    return [column for column in columns if column in names]


def _as_arrow(location: Location) -> Any:
    """Open a file for random access. A file that is compressed is first read into memory.

    Raises ``EOFError`` if its bytes are damaged, and whatever the libraries raise.
    """
    import pyarrow

    if not split_name(location.path)[1]:
        return pyarrow.OSFile(location.path)  # not memory-mapped: if the file shrinks meanwhile, that kills the process
    most = _quarter_of_memory()
    with open_location(location) as reader:
        content = reader.read(most + 1)
        if reader.damage:
            raise EOFError(reader.damage)
    if len(content) > most:
        raise MemoryError(f"it unpacks to more than {most >> 30} GiB, a quarter of the memory: unpack it")
    return pyarrow.BufferReader(content)


def _quarter_of_memory() -> int:
    """In bytes. What is unpacked in memory may take so much."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def _block(table: Any, first: int) -> Block:
    """A slice of a table as a block that begins with row ``first``."""
    import pyarrow

    stream = pyarrow.BufferOutputStream()  # pickling the slice itself would include the whole table
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write(table)
    return Block(first, table.num_rows, table.num_rows, stream.getvalue().to_pybytes())


def _to_dict_or_problem(row: Any, where: str) -> Any:
    """A table of one row as a dict, or as a ``Problem`` if Python cannot hold its values."""
    try:
        return _to_dicts(row)[0]
    except Exception as error:
        return Problem(where, f"cannot be read ({type_and_message(error)})")


def _to_dicts(table: Any) -> list[dict[str, Any]]:
    """The rows of an Arrow table, with nested values as they were before Arrow."""
    from pyarrow import types

    columns = [column.to_pylist() for column in table.columns]  # twice as fast as table.to_pylist()
    for i, kind in enumerate(table.schema.types):
        if types.is_nested(kind):
            columns[i] = [_without_nulls(value) for value in columns[i]]
        if "arrow.json" in str(kind):
            columns[i] = [_parse_json(value, kind) for value in columns[i]]
    if not columns:
        return [{} for _ in range(table.num_rows)]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


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


def num_parquet_rows(name: str, location: Location) -> int:
    """The number of rows, from the file's footer.

    Raises ``UserError`` if the file is not readable parquet, or a few bytes of it claim to be much data.
    """
    from pyarrow import parquet

    try:
        with _as_arrow(location) as file, parquet.ParquetFile(file) as table:
            for chunk in _chunks(table):
                size, stored = chunk.total_uncompressed_size, chunk.total_compressed_size
                # Numbers may all be zero, and each takes few bytes in memory; a string may be long.
                is_text = chunk.physical_type == "BYTE_ARRAY"
                if is_text and size > MAX_BLOCK_BYTES and size > MAX_RATIO * max(stored, 1):
                    found = f"column {chunk.path_in_schema!r} unpacks from {stored} bytes to {size >> 20} MiB"
                    fix = "if you made the file: write it with fewer rows in a group (pyarrow: row_group_size=10000)"
                    raise UserError(Problem(name, found, f"at most {MAX_RATIO} times its bytes", fix))
            return table.metadata.num_rows
    except UserError:
        raise
    except Exception as error:  # several libraries raise here
        raise UserError(Problem(name, f"not a readable parquet file ({type_and_message(error)})")) from None

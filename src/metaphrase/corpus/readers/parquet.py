"""Reading Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from metaphrase.corpus.files import BitextFile, is_language
from metaphrase.corpus.kinds import PARQUET, check_content, check_regular
from metaphrase.corpus.readers.columns import NEGATIVES, find_layout, read_records
from metaphrase.corpus.rows import SEPARATOR, Row
from metaphrase.corpus.text import BadLine, expands_too_far, max_line_bytes
from metaphrase.exceptions import CorpusError

#: Maximum number of rows, and approximate number of bytes, to read at a time.
_ROWS, _BYTES = 1000, 8 << 20
#: Minimum number of rows to read at a time if a side is a field of a struct.
_FIELD_ROWS = 16
#: Types of a column of text; bytes are rejected row by row.
_TEXT = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary())
#: Rows that are converted to Python at a time.
_SLICE = 100


def read_parquet(file: BitextFile, max_chars: int) -> Iterator[tuple[int, Row | BadLine]]:
    """Read a Parquet file."""
    yield from read_records(enumerate(_records(file, max_chars), 1), file)


def _records(file: BitextFile, max_chars: int) -> Iterator[dict[str, Any] | BadLine]:
    """Read the columns of a pair in bounded memory; other columns may contain values that Python cannot represent.

    A column of text is read as a dictionary of distinct values, so that a long value is stored once, even if many
    rows have it. A row with a value that exceeds the length of a line is unreadable.
    """
    path, limit = file.paths[0], max_line_bytes(max_chars)
    check_regular(path)
    with path.open("rb") as stream:
        check_content(path, stream.peek(), accepted=[PARQUET])
    try:
        with pq.ParquetFile(path) as parquet:
            metadata, leaves = parquet.metadata, _leaves(parquet.schema_arrow, file)
        layout = find_layout(leaves, file)
        if layout is None:
            if metadata.num_rows:
                yield dict.fromkeys(leaves)
            return
        wanted = {name: leaf for name, leaf in leaves.items() if name in (*layout[:4], *layout.optional)}
        for name, leaf in wanted.items():
            if not (leaf.text or pa.types.is_null(leaf.kind) or (leaf.listed and name in NEGATIVES)):
                raise CorpusError(f"{file.name}: the column {name!r} holds {leaf.kind}, but should hold text.")
        rows = _batch_rows(file, metadata, list(wanted.values()))
        text = [leaf.path for leaf in wanted.values() if leaf.text and leaf.field is None]
        with pq.ParquetFile(path, metadata=metadata, read_dictionary=text) as parquet:
            for batch in parquet.iter_batches(rows, columns=[leaf.path for leaf in wanted.values()]):
                yield from _rows({name: leaf.of(batch) for name, leaf in wanted.items()}, limit)
    except CorpusError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise CorpusError(f"{file.name} cannot be read as Parquet: {error}") from error


class _Leaf(NamedTuple):
    """A column of a Parquet file, or a field of one."""

    column: str
    field: str | None
    kind: pa.DataType

    @property
    def path(self) -> str:
        """Its path in the Parquet file."""
        return self.column if self.field is None else f"{self.column}.{self.field}"

    @property
    def text(self) -> bool:
        """Whether it holds text."""
        kind = self.kind.value_type if pa.types.is_dictionary(self.kind) else self.kind
        return kind in _TEXT

    @property
    def listed(self) -> bool:
        """Whether it holds lists of strings."""
        is_list = pa.types.is_list(self.kind) or pa.types.is_large_list(self.kind)
        return is_list and self.kind.value_type in (pa.string(), pa.large_string())

    def of(self, batch: pa.RecordBatch) -> pa.Array:
        """Its values; the strings of a list are joined."""
        if self.listed:
            lists = batch.column(self.column)
            kept = [one and [text for text in one if text is not None] for one in lists.to_pylist()]
            return pc.binary_join(pa.array(kept, lists.type) if lists.flatten().null_count else lists, SEPARATOR)
        column = batch.column(self.column)
        values = column if self.field is None else pc.struct_field(column, self.field)
        return values.cast(pa.large_string()) if pa.types.is_string_view(values.type) else values


def _leaves(schema: pa.Schema, file: BitextFile) -> dict[str, _Leaf]:
    """Columns by name; a column ``translation`` of ``{language: text}`` is replaced by its languages."""
    leaves = [_Leaf(field.name, None, field.type) for field in schema]
    for leaf in leaves:
        if leaf.column == "translation" and pa.types.is_struct(leaf.kind):
            leaves.remove(leaf)
            names = {field.name for field in leaf.kind.fields}
            # Other columns may be named like a language, such as id.
            leaves = [other for other in leaves if other.column in names or not is_language(other.column)]
            leaves += [_Leaf(leaf.column, field.name, field.type) for field in leaf.kind.fields]
            break
    named = {leaf.field or leaf.column: leaf for leaf in leaves}
    if len(named) < len(leaves):
        raise CorpusError(f"{file.name} has a duplicate column: {', '.join(leaf.path for leaf in leaves)}.")
    return named


def _batch_rows(file: BitextFile, metadata: pq.FileMetaData, leaves: Sequence[_Leaf]) -> int:
    """Number of rows to read at a time, which bounds the memory even if all values differ.

    Arrow does not read the fields of a struct or the strings of a list as dictionaries, so each row of these may have the
    longest value.
    """
    are_fields = any(leaf.field is not None or leaf.listed for leaf in leaves)
    packed, size, longest = file.paths[0].stat().st_size, 0, 1.0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):  # damaged columns abort the process
        size += group.total_byte_size
        longest = max(longest, group.total_byte_size / (1 if are_fields else max(1, group.num_rows)))
    if expands_too_far(size, packed, file.max_expansion):
        raise CorpusError(
            f"{file.name} expands to more than {file.max_expansion:g} times its size: {size >> 20:,} MiB from "
            f"{packed >> 10:,} KiB. It was not read, as text does not compress that well. If you trust the file, write "
            "it without compression, or pass max_expansion=None."
        )
    return max(_FIELD_ROWS if are_fields else 1, min(_ROWS, int(_BYTES / longest)))


def _rows(columns: dict[str, pa.Array], limit: int) -> Iterator[dict[str, Any] | BadLine]:
    """The rows of a batch, converted to Python a slice at a time."""
    n = len(next(iter(columns.values())))
    is_long_n = np.zeros(n, dtype=bool)
    for name, column in columns.items():
        places = column.indices if pa.types.is_dictionary(column.type) else None
        values = column if places is None else column.dictionary
        if pa.types.is_null(values.type):
            continue
        is_long_d = pc.greater(pc.binary_length(values), limit)
        if pc.any(is_long_d).as_py():
            is_long = is_long_d if places is None else is_long_d.take(places)
            is_long_n |= is_long.fill_null(False).to_numpy(zero_copy_only=False)
            short = pc.if_else(is_long_d, pa.scalar(None, values.type), values)
            columns[name] = short if places is None else pa.DictionaryArray.from_arrays(places, short)
    for first in range(0, n, _SLICE):
        few = [column.slice(first, _SLICE) for column in columns.values()]
        few = [(part.dictionary_decode() if pa.types.is_dictionary(part.type) else part).to_pylist() for part in few]
        for is_long, row in zip(is_long_n[first : first + _SLICE], zip(*few, strict=True), strict=True):
            if is_long:
                yield BadLine("too long", f"more than {limit} bytes")
            else:
                yield dict(zip(columns, row, strict=True))

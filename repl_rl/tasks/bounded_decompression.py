"""Bound on the unpacked size of a compressed file, and a reader of Parquet files that keeps within it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

Record = Mapping[str, object]
MOST_RECORD_BYTES = 32 << 20
"""Longest record that is read, bytes.

A trajectory of a million tokens is smaller. Compressed, such a record may have a thousandth of these bytes.
"""
MOST_RATIO = 100
"""Maximum number of bytes that are unpacked per byte on disk, beyond one record. Text does not compress that well."""
_POINTER = 8
"""Bytes of a reference in memory, at least."""
_ROW = 256
"""Bytes that a row takes in memory besides its values, at least."""
_AT_ONCE = 1024
"""Maximum number of rows of a Parquet file that are decoded at once."""


class _Chunk(Protocol):
    """A column of a row group of a Parquet file."""

    total_uncompressed_size: int
    """Bytes before dictionaries are resolved."""
    num_values: int


class _Group(Protocol):
    """Row group of a Parquet file."""

    def column(self, number: int) -> _Chunk: ...


class Metadata(Protocol):
    """Metadata of a Parquet file."""

    num_columns: int
    num_row_groups: int
    num_rows: int

    def row_group(self, number: int) -> _Group: ...


class _Batch(Protocol):
    """Rows of a Parquet file in memory."""

    def to_pylist(self) -> Sequence[Record]: ...


class ParquetFile(Protocol):
    """Parquet file that is open for reading, of `pyarrow.parquet`."""

    @property
    def metadata(self) -> Metadata: ...

    def iter_batches(self, *, batch_size: int) -> Iterator[_Batch]: ...


def most_unpacked(size: int) -> int:
    """Return the most bytes that are unpacked of `size` bytes on disk."""
    return MOST_RECORD_BYTES + MOST_RATIO * size


def beyond(most: int) -> str:
    """Return the reason to stop at a file that unpacks to more than `most` bytes."""
    return f"it unpacks to more than {most:,} bytes, {MOST_RATIO} times what is on disk; the rest is not read"


def size_of_record(record: Record) -> int:
    """Return about the bytes that a record takes in memory."""
    return _ROW + _size_of(record)


def most_claimed(metadata: Metadata) -> int:
    """Return the bytes that a Parquet file takes in memory at least, by its own metadata."""
    # A value takes at least a pointer in memory.
    held = [max(chunk.total_uncompressed_size, _POINTER * chunk.num_values) for chunk in _chunks(metadata)]
    return _ROW * metadata.num_rows + sum(held)


def parquet_records(file: ParquetFile, most: int) -> Iterator[Record]:
    """Yield the rows of a Parquet file, in batches that take about `most` bytes at most."""
    # A dictionary holds a text once for any number of rows, so each row may take as much as the whole file.
    whole = sum(chunk.total_uncompressed_size for chunk in _chunks(file.metadata))
    at_once = min(_AT_ONCE, max(1, most // max(1, whole)))
    for batch in file.iter_batches(batch_size=at_once):
        yield from batch.to_pylist()


def _chunks(metadata: Metadata) -> list[_Chunk]:
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return [group.column(number) for group in groups for number in range(metadata.num_columns)]


def _size_of(value: object) -> int:
    """Return about the bytes that a value takes in memory."""
    if isinstance(value, str | bytes):
        return _POINTER + len(value)
    if isinstance(value, dict):
        return _POINTER + sum(map(_size_of, value.values()))
    if isinstance(value, list | tuple):
        return _POINTER + sum(map(_size_of, value))
    return _POINTER

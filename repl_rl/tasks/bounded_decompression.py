"""Bound on the unpacked size of a compressed file, and a reader of Parquet files that keeps within it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

Record = Mapping[str, object]
MAX_RECORD_BYTES = 32 << 20
"""Largest uncompressed size of a record that is read, bytes.

A trajectory of a million tokens is smaller than this limit. On disk, a record of this size may be a thousand times
smaller.
"""
MAX_UNPACK_RATIO = 100
"""Maximum number of bytes that are unpacked per byte on disk, beyond one record. Text does not compress that well."""
_POINTER_BYTES = 8
"""Bytes of a reference in memory, at least."""
_ROW_BYTES = 256
"""Bytes that a row takes in memory besides its values, at least."""
_MAX_BATCH_ROWS = 1024
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


def compute_max_unpacked_bytes(size: int) -> int:
    """Return the limit on the unpacked size of a file that has `size` bytes on disk, bytes."""
    return MAX_RECORD_BYTES + MAX_UNPACK_RATIO * size


def describe_size_error(max_bytes: int) -> str:
    """Return the error text for a file that unpacks to more than `max_bytes`."""
    return (
        f"it unpacks to more than {max_bytes:,} bytes, {MAX_UNPACK_RATIO} times what is on disk; the rest is not read"
    )


def estimate_record_bytes(record: Record) -> int:
    """Return about the bytes that a record takes in memory."""
    return _ROW_BYTES + _estimate_bytes(record)


def compute_claimed_bytes(metadata: Metadata) -> int:
    """Return the bytes that a Parquet file takes in memory at least, by its own metadata."""
    # A value takes at least a pointer in memory.
    chunk_bytes = [
        max(chunk.total_uncompressed_size, _POINTER_BYTES * chunk.num_values) for chunk in _list_chunks(metadata)
    ]
    return _ROW_BYTES * metadata.num_rows + sum(chunk_bytes)


def read_parquet_records(file: ParquetFile, max_bytes: int) -> Iterator[Record]:
    """Yield the rows of a Parquet file. At most about `max_bytes` bytes are decoded at once."""
    # A dictionary holds a text once for any number of rows, so each row may take as much as the whole file.
    total_bytes = sum(chunk.total_uncompressed_size for chunk in _list_chunks(file.metadata))
    batch_size = min(_MAX_BATCH_ROWS, max(1, max_bytes // max(1, total_bytes)))
    for batch in file.iter_batches(batch_size=batch_size):
        yield from batch.to_pylist()


def _list_chunks(metadata: Metadata) -> list[_Chunk]:
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return [group.column(number) for group in groups for number in range(metadata.num_columns)]


def _estimate_bytes(value: object) -> int:
    """Return about the bytes that a value takes in memory."""
    if isinstance(value, str | bytes):
        return _POINTER_BYTES + len(value)
    if isinstance(value, dict):
        return _POINTER_BYTES + sum(map(_estimate_bytes, value.values()))
    if isinstance(value, list | tuple):
        return _POINTER_BYTES + sum(map(_estimate_bytes, value))
    return _POINTER_BYTES

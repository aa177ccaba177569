"""Files of gzip members, one per record. Each member stores its own size and id in gzip's extra field.

Any gzip reader unpacks the whole file. `scan_members` walks from member to member without unpacking, and so builds the
index. An interrupted write leaves a last member that is shorter than its stored size; everything before it is complete.
"""

import gzip
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from repl_rl.errors import StoreError
from repl_rl.tasks.bounded_decompression import MAX_RECORD_BYTES, compute_max_unpacked_bytes, describe_size_error

_HEAD = struct.Struct("<2sBBLBB")  # gzip: magic, method, flags, time, extra flags, system
_FIELD = struct.Struct("<H2sHL")  # length of the extra field; our subfield: name, length, size of the member
_TAIL = struct.Struct("<LL")  # CRC32 and length of what was packed
_MAGIC, _DEFLATE, _EXTRA, _UNKNOWN_SYSTEM = b"\x1f\x8b", 8, 4, 255
_SUBFIELD_NAME = b"RL"
_LEVEL = 6
"""Compression level."""


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """Position of a record in a file."""

    path: Path
    offset: int
    """Bytes from the beginning of the file; in a plain gzip file, the number of the line, from 0."""
    size: int
    """Size of the member in bytes; a plain gzip file has 0."""
    id: str

    @property
    def is_plain(self) -> bool:
        """True if the file is ordinary gzip of another writer, which can only be read from its beginning."""
        return self.size == 0


@dataclass(frozen=True, slots=True)
class DamagedRegion:
    """Part of a file that holds no readable record."""

    path: Path
    offset: int
    """Bytes from the beginning of the file."""
    reason: str

    def __str__(self) -> str:
        return f"{self.path} from byte {self.offset}: {self.reason}"


def pack_member(id: str, record: bytes) -> bytes:
    """Return one gzip member with the record and its id."""
    name = id.encode("utf-8", "surrogatepass")
    body = zlib.compress(record, _LEVEL, wbits=-zlib.MAX_WBITS)
    size = _HEAD.size + _FIELD.size + len(name) + len(body) + _TAIL.size
    head = _HEAD.pack(_MAGIC, _DEFLATE, _EXTRA, 0, 0, _UNKNOWN_SYSTEM)
    # The subfield holds the member's size and its id; its length counts the 4 bytes of the size.
    field = _FIELD.pack(8 + len(name), _SUBFIELD_NAME, 4 + len(name), size)
    return head + field + name + body + _TAIL.pack(zlib.crc32(record), len(record) & 0xFFFFFFFF)


def scan_members(path: Path) -> Iterator[RecordLocation | DamagedRegion]:
    """Yield the positions of a file's records in order, and at most one `DamagedRegion`, as the last item.

    Nothing is unpacked.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        offset = 0
        while offset < size:
            item = _read_location(file, path, offset)
            if isinstance(item, RecordLocation) and offset + item.size > size:
                item = DamagedRegion(
                    path, offset, f"torn: {size - offset} of {item.size} bytes of {item.id!r} are there"
                )
            yield item
            if isinstance(item, DamagedRegion):
                return
            offset += item.size


def _read_location(file: BinaryIO, path: Path, offset: int) -> RecordLocation | DamagedRegion:
    """Read the header of the member at `offset`."""
    file.seek(offset)
    head = file.read(_HEAD.size + _FIELD.size)
    if len(head) < _HEAD.size + _FIELD.size:
        return DamagedRegion(path, offset, f"torn: {len(head)} bytes are left, which is no record")
    magic, method, flags, *_ = _HEAD.unpack_from(head)
    _, name, length, size = _FIELD.unpack_from(head, _HEAD.size)
    # `head` already includes the 4 bytes of the size, which `length` counts again.
    min_size = len(head) + length - 4 + _TAIL.size
    if (magic, method, flags, name) != (_MAGIC, _DEFLATE, _EXTRA, _SUBFIELD_NAME) or length < 4 or size < min_size:
        return DamagedRegion(path, offset, "no record begins here")
    return RecordLocation(path, offset, size, file.read(length - 4).decode("utf-8", "replace"))


def is_plain_gzip(path: Path) -> bool:
    """Return True for gzip without stored sizes: written by version 1, or repacked by another program."""
    with path.open("rb") as file:
        head = file.read(4)
    return head[:3] == _MAGIC + bytes([_DEFLATE]) and head[3:] != bytes([_EXTRA])


def read_plain_lines(path: Path) -> Iterator[bytes | DamagedRegion]:
    """Yield the lines of a plain file, and at most one `DamagedRegion`, as the last item."""
    # Limit each line and the whole file, so that a hostile file cannot fill the memory.
    unpacked, max_bytes = 0, compute_max_unpacked_bytes(path.stat().st_size)
    with gzip.open(path, "rb") as file:
        try:
            while line := file.readline(MAX_RECORD_BYTES + 1):
                unpacked += len(line)
                if len(line) > MAX_RECORD_BYTES:
                    yield DamagedRegion(
                        path, 0, f"a line has more than {MAX_RECORD_BYTES:,} bytes; the rest is not read"
                    )
                    return
                if unpacked > max_bytes:
                    yield DamagedRegion(path, 0, describe_size_error(max_bytes))
                    return
                yield line
        except (EOFError, OSError, zlib.error) as error:
            yield DamagedRegion(path, path.stat().st_size, f"torn after {unpacked} unpacked bytes, or no gzip: {error}")


def unpack_member(location: RecordLocation) -> bytes:
    """Return the record at `location`.

    Raises:
        StoreError: it is damaged, or larger than `MAX_RECORD_BYTES`.
    """
    # A plain file has no index, so read it from its beginning.
    if location.is_plain:
        for number, line in enumerate(read_plain_lines(location.path)):
            if number == location.offset and isinstance(line, bytes):
                return line
        raise StoreError(f"{location.path}, line {location.offset + 1}: it is not there any more")
    description = f"{location.path} from byte {location.offset}: {location.id!r}"
    if location.size > MAX_RECORD_BYTES:
        raise StoreError(f"{description} has more than {MAX_RECORD_BYTES:,} bytes, which is no trajectory")
    with location.path.open("rb") as file:
        file.seek(location.offset)
        member = file.read(location.size)
    decompressor = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        # Ask for one byte more than allowed, so that a record that is too long shows.
        record = decompressor.decompress(member, MAX_RECORD_BYTES + 1)
    except zlib.error as error:
        raise StoreError(f"{description} is damaged: {error}") from error
    if len(record) > MAX_RECORD_BYTES:
        raise StoreError(f"{description} unpacks to more than {MAX_RECORD_BYTES:,} bytes, which is no trajectory")
    if not decompressor.eof or decompressor.unused_data:
        raise StoreError(f"{description} is damaged: it does not end where it says")
    return record

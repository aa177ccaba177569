"""A file of gzip members, one a record. Each member names its own size and id in gzip's extra field.

So any gzip reader unpacks the whole file; ours walks from member to member without unpacking, which is the index. A
write that was cut short leaves a last member that is shorter than it says, and everything before it whole.
"""

import gzip
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from repl_rl.errors import StoreError

_HEAD = struct.Struct("<2sBBLBB")  # gzip: magic, method, flags, time, extra flags, system
_FIELD = struct.Struct("<H2sHL")  # length of the extra field; our subfield: name, length, size of the member
_TAIL = struct.Struct("<LL")  # CRC32 and length of what was packed
_MAGIC, _DEFLATE, _EXTRA, _UNKNOWN_SYSTEM = b"\x1f\x8b", 8, 4, 255
_NAME = b"RL"
_LEVEL = 6
MOST_RECORD_BYTES = 32 << 20
"""Longest record that is read: a trajectory of a million tokens has less. Compressed it may be a thousandth of that."""
MOST_RATIO = 100
"""Most bytes that are unpacked per byte on disk, beyond one record. Log probabilities do not compress so far."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies."""

    path: Path
    offset: int
    """Bytes from the beginning of the file; in a `plain` file, the number of its line, from 0."""
    size: int
    """Bytes of the member; 0 in a `plain` file."""
    id: str

    @property
    def plain(self) -> bool:
        """True where the file is gzip from elsewhere, which can only be read from its beginning."""
        return self.size == 0


@dataclass(frozen=True, slots=True)
class Damage:
    """A part of a file that holds no readable record."""

    path: Path
    offset: int
    """Bytes from the beginning of the file."""
    reason: str

    def __str__(self) -> str:
        return f"{self.path} from byte {self.offset}: {self.reason}"


def pack(id: str, record: bytes) -> bytes:
    """One member."""
    name = id.encode("utf-8", "surrogatepass")
    body = zlib.compress(record, _LEVEL, wbits=-zlib.MAX_WBITS)
    size = _HEAD.size + _FIELD.size + len(name) + len(body) + _TAIL.size
    head = _HEAD.pack(_MAGIC, _DEFLATE, _EXTRA, 0, 0, _UNKNOWN_SYSTEM)
    field = _FIELD.pack(8 + len(name), _NAME, 4 + len(name), size)
    return head + field + name + body + _TAIL.pack(zlib.crc32(record), len(record) & 0xFFFFFFFF)


def scan(path: Path) -> Iterator[Place | Damage]:
    """The records of a file in order, and at most one `Damage`, which comes last. Nothing is unpacked."""
    size = path.stat().st_size
    with path.open("rb") as file:
        offset = 0
        while offset < size:
            found = _place(file, path, offset)
            if isinstance(found, Place) and offset + found.size > size:
                found = Damage(path, offset, f"torn: {size - offset} of {found.size} bytes of {found.id!r} are there")
            yield found
            if isinstance(found, Damage):
                return
            offset += found.size


def _place(file: BinaryIO, path: Path, offset: int) -> Place | Damage:
    file.seek(offset)
    head = file.read(_HEAD.size + _FIELD.size)
    if len(head) < _HEAD.size + _FIELD.size:
        return Damage(path, offset, f"torn: {len(head)} bytes are left, which is no record")
    magic, method, flags, *_ = _HEAD.unpack_from(head)
    _, name, length, size = _FIELD.unpack_from(head, _HEAD.size)
    least = len(head) + length - 4 + _TAIL.size
    if (magic, method, flags, name) != (_MAGIC, _DEFLATE, _EXTRA, _NAME) or length < 4 or size < least:
        return Damage(path, offset, "no record begins here")
    return Place(path, offset, size, file.read(length - 4).decode("utf-8", "replace"))


def is_plain(path: Path) -> bool:
    """True for gzip without our sizes: written by version 1, or packed again by another program."""
    with path.open("rb") as file:
        head = file.read(4)
    return head[:3] == _MAGIC + bytes([_DEFLATE]) and head[3:] != bytes([_EXTRA])


def plain_lines(path: Path) -> Iterator[bytes | Damage]:
    """The lines of a plain file, and at most one `Damage`, which comes last."""
    unpacked, most = 0, most_unpacked(path.stat().st_size)
    with gzip.open(path, "rb") as file:
        try:
            while line := file.readline(MOST_RECORD_BYTES + 1):
                unpacked += len(line)
                if len(line) > MOST_RECORD_BYTES:
                    yield Damage(path, 0, f"a line has more than {MOST_RECORD_BYTES:,} bytes; the rest is not read")
                    return
                if unpacked > most:
                    yield Damage(path, 0, beyond(most))
                    return
                yield line
        except (EOFError, OSError, zlib.error) as error:
            yield Damage(path, path.stat().st_size, f"torn after {unpacked} unpacked bytes, or no gzip: {error}")


def unpack(place: Place) -> bytes:
    """The record at `place`.

    Raises:
        StoreError: it is damaged.
    """
    if place.plain:
        for number, line in enumerate(plain_lines(place.path)):
            if number == place.offset and isinstance(line, bytes):
                return line
        raise StoreError(f"{place.path}, line {place.offset + 1}: it is not there any more")
    where = f"{place.path} from byte {place.offset}: {place.id!r}"
    if place.size > MOST_RECORD_BYTES:
        raise StoreError(f"{where} has more than {MOST_RECORD_BYTES:,} bytes, which is no trajectory")
    with place.path.open("rb") as file:
        file.seek(place.offset)
        member = file.read(place.size)
    unpacking = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        record = unpacking.decompress(member, MOST_RECORD_BYTES + 1)
    except zlib.error as error:
        raise StoreError(f"{where} is damaged: {error}") from error
    if len(record) > MOST_RECORD_BYTES:
        raise StoreError(f"{where} unpacks to more than {MOST_RECORD_BYTES:,} bytes, which is no trajectory")
    if not unpacking.eof or unpacking.unused_data:
        raise StoreError(f"{where} is damaged: it does not end where it says")
    return record


def most_unpacked(size: int) -> int:
    """Most bytes that are unpacked of `size` bytes on disk."""
    return MOST_RECORD_BYTES + MOST_RATIO * size


def beyond(most: int) -> str:
    """The reason of a `Damage` where the rest is not read."""
    return f"it unpacks to more than {most:,} bytes, {MOST_RATIO} times what is on disk; the rest is not read"

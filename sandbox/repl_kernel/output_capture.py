"""Capture of a console's file descriptors 1 and 2 in one file, in order. It is read after each line.

The file is in memory and is written in append mode. The supervisor shares the reading end, so it finds the output of a
console that died.
"""

import io
import os
import sys
from dataclasses import dataclass

from repl_kernel import libc_calls as system

_KEEP_BYTES = 262_144
"""Size of the steps in which read storage is freed."""


def _trim_to_whole_characters(data: bytes, *, at_start: bool) -> bytes:
    """Return `data` without the part of a UTF-8 character that a cut left at one of its ends."""
    if at_start:
        start = 0
        while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
            start += 1
        return data[start:]
    for distance in range(1, min(4, len(data)) + 1):
        byte = data[-distance]
        if byte & 0xC0 == 0x80:
            continue
        length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        return data[:-distance] if length > distance else data
    return data


def _replace_invalid(data: bytes) -> bytes:
    """Return `data` as UTF-8. Each other byte becomes a character of 3 bytes."""
    return data.decode("utf-8", "replace").encode()


@dataclass(frozen=True)
class CapturedOutput:
    """Output since the last read."""

    text: str
    """Output up to the limit, in UTF-8 bytes. Longer output consists of head, marker and tail."""
    truncated: bool
    """True if the marker replaced the middle."""


class OutputCapture:
    """File behind a console's stdout and stderr."""

    def __init__(self, folder: str, limit: int, max_file_bytes: int | None = None) -> None:
        """Create the file.

        Args:
            folder: folder for the file.
            limit: maximum bytes shown per line.
            max_file_bytes: maximum size of the file, bytes; None means the room of a separate mount, without the
                punched holes.
        """
        path = os.path.join(folder, "output")
        self._write_fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._read_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.unlink(path)
        self._limit = limit
        self._full = None if max_file_bytes is None else max_file_bytes // 2
        self._position = 0
        self._punched = 0

    def redirect_and_reopen(self) -> None:
        """Make this file the standard output and error of the process, and replace `sys.stdout` and `sys.stderr`."""
        self.redirect()
        for number, name in ((1, "stdout"), (2, "stderr")):
            stream = getattr(sys, f"__{name}__")
            raw = io.FileIO(number, "wb", closefd=False)
            raw.name = f"<{name}>"
            # Do not buffer, so that stdout and stderr keep their order and a forked child prints nothing twice.
            layer = io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, write_through=True)
            setattr(layer, "mode", "w")  # noqa: B010 - as the interpreter does; typed as read-only
            setattr(sys, name, layer)
            setattr(sys, f"__{name}__", layer)

    def redirect(self) -> None:
        """Make this file the standard output and error of the process."""
        os.dup2(self._write_fd, 1)
        os.dup2(self._write_fd, 2)

    def detach(self) -> None:
        """Discard the output of this process and close the file, so that no process forked later can reach it."""
        null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, 1)
        os.dup2(null, 2)
        for descriptor in (null, self._write_fd, self._read_fd):
            os.close(descriptor)

    def take_output(self) -> CapturedOutput:
        """Return the output since the last call."""
        end = os.fstat(self._write_fd).st_size
        size = end - self._position
        if size == 0:
            return CapturedOutput("", False)
        if size < 0:
            # The program truncated its own output.
            self._position = self._punched = os.lseek(self._read_fd, end, os.SEEK_SET)
            return CapturedOutput("", False)
        printed = self._read_until(end)
        self._position = os.lseek(self._read_fd, end, os.SEEK_SET)
        if self._full is not None and end > self._full:
            # A hole does not shorten the file, so truncate it.
            os.ftruncate(self._write_fd, 0)
            self._position = self._punched = os.lseek(self._read_fd, 0, os.SEEK_SET)
        elif end - self._punched > _KEEP_BYTES:
            self._punch_hole(self._punched, end)
            self._punched = end
        return printed

    def take_rest(self) -> CapturedOutput:
        """As `take_output`, for the supervisor: continue at the position up to which the console has read."""
        self._position = os.lseek(self._read_fd, 0, os.SEEK_CUR)
        return self.take_output()

    def free_middle(self) -> None:
        """Free the middle of this line's output, so that a traceback can still be written."""
        end = os.fstat(self._write_fd).st_size
        head = self._position + self._limit
        if end - head > self._limit:
            self._punch_hole(head, end - self._limit)

    def _punch_hole(self, start: int, end: int) -> None:
        try:
            system.punch_hole(self._write_fd, start, end)
        except OSError:
            # A file system without holes keeps the storage until the console ends.
            return

    def _read_until(self, end: int) -> CapturedOutput:
        size = end - self._position
        if size > self._limit:
            half_bytes = self._limit // 2
            head = os.pread(self._read_fd, half_bytes, self._position)
            tail = os.pread(self._read_fd, half_bytes, end - half_bytes)
            return self._shorten(_replace_invalid(head), _replace_invalid(tail), size - self._limit)
        output = _replace_invalid(os.pread(self._read_fd, size, self._position))
        if len(output) > self._limit:
            return self._shorten(output, output, len(output) - self._limit)
        return CapturedOutput(output.decode(), False)

    def _shorten(self, head: bytes, tail: bytes, omitted_bytes: int) -> CapturedOutput:
        """Return the start of `head`, a marker and the end of `tail`, which share the limit."""
        marker = f"\n[... {omitted_bytes} bytes of output not shown ...]\n".encode()
        room = (self._limit - len(marker)) // 2
        start, end = (
            _trim_to_whole_characters(head[:room], at_start=False),
            _trim_to_whole_characters(tail[-room:], at_start=True),
        )
        return CapturedOutput((start + marker + end).decode(), True)

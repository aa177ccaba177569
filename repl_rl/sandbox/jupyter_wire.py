"""Line protocol of every console: cells from lines, and checked messages.

`JupyterWire` is the host half of the Jupyter wire format: one request per line, as a list of frames, and one checked
reply. `PendingCell` buffers lines into cells.

All data from a console is untrusted. Code in a cell can read the key, so a valid signature does not prove the sender of
a message. The content is checked field by field.
"""

import hashlib
import hmac
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from repl_rl.sandbox.base import LineResult
from repl_rl.trajectory.console_text import CellBuffer, CellStatus
from repl_rl.trajectory.trajectory import LineStatus

# The bytes that `sandbox/repl_kernel/wire.py` uses as well. It runs in the console and cannot import this package.
DELIMITER = b"<IDS|MSG>"
_LINE_METADATA = b'{"repl_line":true}'
_CALL_HEADER = b'{"msg_type":"repl_host_call"}'
_NUMBER_DIGITS = 18
"""Maximum digits in the number of a call."""
MAX_ANSWER_CHARS = 65_536
"""Longest answer that a console accepts. Its code can be changed by a line, so the host checks this, too."""
_OUTCOMES = frozenset({"incomplete", "ok", "syntax_error", "exception", "memory_limit", "exited"})
"""Outcomes of a line that a console may claim."""


class MalformedReply(Exception):
    """Reply to our request that does not have the format of a console's reply."""


@dataclass(frozen=True, slots=True)
class ConsoleReply:
    """Claim of a console about one line."""

    text: str
    truncated: bool
    """True if the middle of the output was left out."""
    incomplete: bool
    claimed_outcome: str
    answer: str | None


@dataclass(frozen=True, slots=True)
class HostCallMessage:
    """Call of a host function, as a console claims it. Its content is not parsed."""

    line: bytes
    """Header of the request of the calling line."""
    number: bytes
    """Number that distinguishes it from other calls of the line."""
    content: bytes


class JupyterWire:
    """Signer of requests and parser of their replies, for one console."""

    def __init__(self, key: str) -> None:
        # Copying a keyed HMAC is cheaper than making one per message.
        self._empty = hmac.HMAC(key.encode(), digestmod=hashlib.sha256)

    def encode_request(
        self, code: str, offer: Mapping[str, object] | None = None, discard_answer: bool = False
    ) -> tuple[bytes, list[bytes]]:
        """Return the header, with a message id that cannot be guessed, and all frames of a request to run `code`.

        `offer`: description of the host functions; None sends none. `discard_answer`: the console discards its answer.
        """
        header = (
            b'{"msg_id":"' + os.urandom(16).hex().encode() + b'","session":"host","username":"host","date":"",'
            b'"msg_type":"execute_request","version":"5.3"}'
        )
        fields: dict[str, object] = {"code": code, "silent": True, "store_history": False, "allow_stdin": False}
        offer_fields = {} if offer is None else {"host": offer}
        content = json.dumps(
            {**fields, **offer_fields, "afresh": True} if discard_answer else {**fields, **offer_fields}
        ).encode()
        body = [header, b"{}", _LINE_METADATA, content]
        return header, [DELIMITER, self._sign(body), *body]

    def decode_call(self, frames: list[bytes], line: bytes) -> HostCallMessage | None:
        """Return the call that the line with the header `line` makes, or None if `frames` are anything else."""
        if len(frames) != 6 or frames[0] != DELIMITER or frames[2] != _CALL_HEADER or frames[3] != line:
            return None
        if not frames[4].isdigit() or len(frames[4]) > _NUMBER_DIGITS:
            return None
        return (
            HostCallMessage(line, frames[4], frames[5])
            if hmac.compare_digest(self._sign(frames[2:]), frames[1])
            else None
        )

    def encode_host_reply(self, call: HostCallMessage, content: bytes) -> list[bytes]:
        """Return the frames of the answer to a call."""
        body = [_CALL_HEADER, call.line, call.number, content]
        return [DELIMITER, self._sign(body), *body]

    def decode_reply(self, frames: list[bytes], header: bytes) -> ConsoleReply | None:
        """Return the reply to the request with `header`, or None if `frames` are anything else.

        Raises:
            MalformedReply: it answers that request, but does not have the format of a console's reply.
        """
        if len(frames) != 6 or frames[0] != DELIMITER or frames[2] == _CALL_HEADER or frames[3] != header:
            return None
        if not hmac.compare_digest(self._sign(frames[2:]), frames[1]):
            return None
        try:
            return validate_claim(json.loads(frames[5])["repl"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise MalformedReply(str(error)) from error

    def _sign(self, body: list[bytes]) -> bytes:
        mac = self._empty.copy()
        for frame in body:
            mac.update(frame)
        return mac.hexdigest().encode()


def replace_surrogates(text: str) -> str:
    """Return `text` with each half of a surrogate pair replaced by "?", so that it can be stored as UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def validate_claim(claim: Mapping[str, object]) -> ConsoleReply:
    """Parse the claim of a console about one line, field by field.

    Raises:
        MalformedReply, KeyError, TypeError: the claim does not have the format of a console's reply.
    """
    text, truncated, incomplete, outcome, answer = (
        claim[name] for name in ("text", "cut", "more", "outcome", "answer")
    )
    if not (
        isinstance(text, str)
        and isinstance(truncated, bool)
        and isinstance(incomplete, bool)
        and isinstance(outcome, str)
        and outcome in _OUTCOMES
        and (answer is None or isinstance(answer, str))
    ):
        raise MalformedReply("a field has the wrong type")
    if answer is not None and len(answer) > MAX_ANSWER_CHARS:
        raise MalformedReply(f"the answer has {len(answer)} characters; at most {MAX_ANSWER_CHARS} are allowed")
    return ConsoleReply(
        replace_surrogates(text), truncated, incomplete, outcome, None if answer is None else replace_surrogates(answer)
    )


class PendingCell:
    """Lines that were typed but not sent to the console yet."""

    def __init__(self, *, decide: bool) -> None:
        """`decide`: host and console run the same Python, so the host may decide whether a cell is complete."""
        self._cell = CellBuffer(decide=decide)
        self._unsent: list[str] = []

    def add_line(self, line: str) -> LineResult | str:
        """Return the code to send now, or the line's result if the console is not needed."""
        start = time.perf_counter()
        verdict = self._cell.add(line)
        if verdict is CellStatus.VOID:
            return LineResult("", False, LineStatus.OK, None, time.perf_counter() - start)
        self._unsent.append(line)
        if verdict is CellStatus.INCOMPLETE:
            return LineResult("", True, LineStatus.INCOMPLETE, None, time.perf_counter() - start)
        code = "\n".join(self._unsent)
        self._unsent.clear()
        return code

    def update_from_result(self, result: LineResult) -> bool:
        """Record the result of a line. Return True if the console accepts no further line after it."""
        if not result.incomplete:
            self._cell.reset()
        return result.status in (LineStatus.ANSWERED, LineStatus.EXITED)

"""Host half of the Jupyter wire format: one request per line, as a list of frames, and one checked reply.

All data from a console is untrusted. Code in a cell can read the key, so a valid signature does not prove the sender of
a message. The content is checked field by field.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

DELIMITER = b"<IDS|MSG>"
_LINE_METADATA = b'{"repl_line":true}'
_CALL_HEADER = b'{"msg_type":"repl_host_call"}'
_NUMBER_DIGITS = 18
MAX_ANSWER_CHARS = 65_536
"""Longest answer that a console accepts. Its code can be changed by a line, so the host checks this, too."""
_OUTCOMES = frozenset({"incomplete", "ok", "syntax_error", "exception", "memory_limit", "exited"})


class MalformedReply(Exception):
    """Reply to our request that does not have the format of a console's reply."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Claim of a console about one line."""

    text: str
    cut: bool
    """True if the middle of the output was left out."""
    more: bool
    outcome: str
    answer: str | None


@dataclass(frozen=True, slots=True)
class Call:
    """Call of a host function, as a console claims it. Its content is not parsed."""

    line: bytes
    """Header of the request of the calling line."""
    number: bytes
    """Number that distinguishes it from other calls of the line."""
    content: bytes


class Wire:
    """Signer of requests and parser of their replies, for one console."""

    def __init__(self, key: str) -> None:
        # Copying a keyed HMAC is cheaper than making one per message.
        self._empty = hmac.HMAC(key.encode(), digestmod=hashlib.sha256)

    def request(
        self, code: str, offer: Mapping[str, object] | None = None, afresh: bool = False
    ) -> tuple[bytes, list[bytes]]:
        """Return the header, with a message id that cannot be guessed, and all frames of a request to run `code`.

        `offer`: description of the host functions; None sends none. `afresh`: the console discards its answer.
        """
        header = (
            b'{"msg_id":"' + os.urandom(16).hex().encode() + b'","session":"host","username":"host","date":"",'
            b'"msg_type":"execute_request","version":"5.3"}'
        )
        said: dict[str, object] = {"code": code, "silent": True, "store_history": False, "allow_stdin": False}
        more = {} if offer is None else {"host": offer}
        content = json.dumps({**said, **more, "afresh": True} if afresh else {**said, **more}).encode()
        body = [header, b"{}", _LINE_METADATA, content]
        return header, [DELIMITER, self._sign(body), *body]

    def call(self, frames: list[bytes], line: bytes) -> Call | None:
        """Return the call that the line with the header `line` makes, or None if `frames` are anything else."""
        if len(frames) != 6 or frames[0] != DELIMITER or frames[2] != _CALL_HEADER or frames[3] != line:
            return None
        if not frames[4].isdigit() or len(frames[4]) > _NUMBER_DIGITS:
            return None
        return Call(line, frames[4], frames[5]) if hmac.compare_digest(self._sign(frames[2:]), frames[1]) else None

    def host_reply(self, call: Call, content: bytes) -> list[bytes]:
        """Return the frames of the answer to a call."""
        body = [_CALL_HEADER, call.line, call.number, content]
        return [DELIMITER, self._sign(body), *body]

    def reply(self, frames: list[bytes], header: bytes) -> Reply | None:
        """Return the reply to the request with `header`, or None if `frames` are anything else.

        Raises:
            MalformedReply: it answers that request, but does not have the format of a console's reply.
        """
        if len(frames) != 6 or frames[0] != DELIMITER or frames[2] == _CALL_HEADER or frames[3] != header:
            return None
        if not hmac.compare_digest(self._sign(frames[2:]), frames[1]):
            return None
        try:
            return claimed(json.loads(frames[5])["repl"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise MalformedReply(str(error)) from error

    def _sign(self, body: list[bytes]) -> bytes:
        mac = self._empty.copy()
        for frame in body:
            mac.update(frame)
        return mac.hexdigest().encode()


def plain_text(text: str) -> str:
    """Return `text` with each half of a surrogate pair replaced by "?", so that it can be stored as UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def claimed(claim: Mapping[str, object]) -> Reply:
    """Parse the claim of a console about one line, field by field.

    Raises:
        MalformedReply, KeyError, TypeError: the claim does not have the format of a console's reply.
    """
    text, cut, more, outcome, answer = (claim[name] for name in ("text", "cut", "more", "outcome", "answer"))
    if not (
        isinstance(text, str)
        and isinstance(cut, bool)
        and isinstance(more, bool)
        and isinstance(outcome, str)
        and outcome in _OUTCOMES
        and (answer is None or isinstance(answer, str))
    ):
        raise MalformedReply("a field has the wrong type")
    if answer is not None and len(answer) > MAX_ANSWER_CHARS:
        raise MalformedReply(f"the answer has {len(answer)} characters; at most {MAX_ANSWER_CHARS} are allowed")
    return Reply(plain_text(text), cut, more, outcome, None if answer is None else plain_text(answer))

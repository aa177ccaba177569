"""The host's half of the Jupyter wire format: one request frame list a line, one checked reply.

Whatever a console sends is untrusted. Code in a cell owns the key, so a good signature proves nothing about who
wrote a message; what it says is checked field by field.
"""

import hashlib
import hmac
import json
import os
from dataclasses import dataclass

DELIMITER = b"<IDS|MSG>"
_LINE_METADATA = b'{"repl_line":true}'
_OUTCOMES = frozenset({"incomplete", "ok", "syntax_error", "exception", "memory_limit", "exited"})


class MalformedReply(Exception):
    """A reply to our request that does not say what a console says."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a console claims about one line."""

    text: str
    cut: bool
    """The middle of the output was left out."""
    more: bool
    outcome: str
    answer: str | None


class Wire:
    """Signs requests and recognises their replies, for one console."""

    def __init__(self, key: str) -> None:
        self._empty = hmac.HMAC(key.encode(), digestmod=hashlib.sha256)

    def request(self, code: str) -> tuple[bytes, list[bytes]]:
        """The header (with a message id that nobody can guess) and all frames of a request to run `code`."""
        header = (
            b'{"msg_id":"' + os.urandom(16).hex().encode() + b'","session":"host","username":"host","date":"",'
            b'"msg_type":"execute_request","version":"5.3"}'
        )
        content = json.dumps({"code": code, "silent": True, "store_history": False, "allow_stdin": False}).encode()
        body = [header, b"{}", _LINE_METADATA, content]
        return header, [DELIMITER, self._sign(body), *body]

    def reply(self, frames: list[bytes], header: bytes) -> Reply | None:
        """The reply to the request with `header`; None when `frames` are anything else.

        Raises:
            MalformedReply: it answers that request, but is not what a console sends.
        """
        if len(frames) != 6 or frames[0] != DELIMITER or frames[3] != header:
            return None
        if not hmac.compare_digest(self._sign(frames[2:]), frames[1]):
            return None
        try:
            claim = json.loads(frames[5])["repl"]
            text, cut, more, outcome, answer = (claim[name] for name in ("text", "cut", "more", "outcome", "answer"))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise MalformedReply(str(error)) from error
        good = (
            isinstance(text, str)
            and isinstance(cut, bool)
            and isinstance(more, bool)
            and isinstance(outcome, str)
            and outcome in _OUTCOMES
            and (answer is None or isinstance(answer, str))
        )
        if not good:
            raise MalformedReply("a field has the wrong type")
        return Reply(plain_text(text), cut, more, outcome, None if answer is None else plain_text(answer))

    def _sign(self, body: list[bytes]) -> bytes:
        mac = self._empty.copy()
        for frame in body:
            mac.update(frame)
        return mac.hexdigest().encode()


def plain_text(text: str) -> str:
    """`text` with each half of a surrogate pair replaced by "?", so that it can be stored as UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")

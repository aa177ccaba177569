"""The Jupyter wire format, as far as the fast path needs it: frames, their signature, a parsed request."""

import hashlib
import hmac
import json
from dataclasses import dataclass

DELIMITER = b"<IDS|MSG>"
LINE_METADATA = b'{"repl_line":true}'
"""Metadata of a request that asks for the fast path: one reply, nothing on iopub."""
CALL_HEADER = b'{"msg_type":"repl_host_call"}'
"""Header of a call of one of the host's functions; its parent is the request of the line, its metadata a number."""


class Signer:
    """HMAC-SHA256 of the four JSON frames of a message."""

    def __init__(self, key: bytes) -> None:
        self._empty = hmac.HMAC(key, digestmod=hashlib.sha256)

    def sign(self, frames: list[bytes]) -> bytes:
        """The signature frame, in hexadecimal."""
        mac = self._empty.copy()
        for frame in frames:
            mac.update(frame)
        return mac.hexdigest().encode()


@dataclass(frozen=True)
class Offer:
    """Functions of the host that lines may call."""

    functions: dict[str, str]
    """Name -> documentation."""
    argument_bytes: int
    """Most bytes of a call, as JSON."""


@dataclass(frozen=True)
class LineRequest:
    """A request for the fast path."""

    identities: list[bytes]
    header: bytes
    code: str
    offer: Offer | None
    """Comes with the first line, where there are such functions."""
    afresh: bool = False
    """The answer that was given is forgotten: another question was asked."""


def read_line_request(frames: list[bytes], signer: Signer) -> LineRequest | None:
    """The request in `frames`; None when they are something else (an ordinary message, or not signed by the key)."""
    if DELIMITER not in frames:
        return None
    at = frames.index(DELIMITER)
    body = frames[at + 2 :]
    if len(body) != 4 or body[2] != LINE_METADATA:
        return None
    if not hmac.compare_digest(signer.sign(body), frames[at + 1]):
        return None
    content = json.loads(body[3])
    offer = content.get("host")
    offered = Offer(**offer) if offer else None
    return LineRequest(frames[:at], body[0], content["code"], offered, bool(content.get("afresh")))


_REPLY_HEADER = json.dumps(
    {"msg_id": "r", "session": "r", "username": "kernel", "date": "", "msg_type": "execute_reply", "version": "5.3"}
).encode()


def line_reply(request: LineRequest, content: dict[str, object], signer: Signer) -> list[bytes]:
    """The frames of the one reply; the request's own header bytes say what it answers."""
    body = [_REPLY_HEADER, request.header, b"{}", json.dumps(content).encode()]
    return [*request.identities, DELIMITER, signer.sign(body), *body]


def host_call(line: LineRequest, number: int, content: bytes, signer: Signer) -> list[bytes]:
    """The frames of a call that `line` makes; `number` tells it from others of the line."""
    body = [CALL_HEADER, line.header, str(number).encode(), content]
    return [*line.identities, DELIMITER, signer.sign(body), *body]


def read_host_reply(frames: list[bytes], line_header: bytes, signer: Signer) -> tuple[int, bytes] | None:
    """The number and content of an answer to a call of that line; None: `frames` are something else."""
    if DELIMITER not in frames:
        return None
    at = frames.index(DELIMITER)
    body = frames[at + 2 :]
    if len(body) != 4 or body[0] != CALL_HEADER or body[1] != line_header:
        return None
    return (int(body[2]), body[3]) if hmac.compare_digest(signer.sign(body), frames[at + 1]) else None

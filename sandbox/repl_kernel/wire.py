"""Jupyter wire format, as far as the fast path needs it: frames, their signature, and a parsed request."""

import hashlib
import hmac
import json
from dataclasses import dataclass

DELIMITER = b"<IDS|MSG>"
LINE_METADATA = b'{"repl_line":true}'
"""Metadata of a request for the fast path: one reply, and no message on iopub."""
CALL_HEADER = b'{"msg_type":"repl_host_call"}'
"""Header of a call of a host function. Its parent is the request of the line, and its metadata is a number."""


class MessageSigner:
    """Signer of messages: HMAC-SHA256 of their four JSON frames."""

    def __init__(self, key: bytes) -> None:
        # Copying a keyed HMAC is cheaper than making one per message.
        self._empty = hmac.HMAC(key, digestmod=hashlib.sha256)

    def sign(self, frames: list[bytes]) -> bytes:
        """Return the signature frame, in hexadecimal."""
        mac = self._empty.copy()
        for frame in frames:
            mac.update(frame)
        return mac.hexdigest().encode()


@dataclass(frozen=True)
class HostFunctionsMessage:
    """Functions of the host that lines may call."""

    functions: dict[str, str]
    """Documentation of each function, by name."""
    argument_bytes: int
    """Maximum size of a call as JSON, bytes."""


@dataclass(frozen=True)
class LineRequest:
    """Request for the fast path."""

    identities: list[bytes]
    header: bytes
    code: str
    host_functions: HostFunctionsMessage | None
    """Functions of the host, with the first line. None means none, or a later line."""
    forget_answer: bool = False
    """True to discard the last answer, because another question was asked."""


def decode_line_request(frames: list[bytes], signer: MessageSigner) -> LineRequest | None:
    """Return the request in `frames`, or None if they are an ordinary message or are not signed with the key."""
    if DELIMITER not in frames:
        return None
    index = frames.index(DELIMITER)
    body = frames[index + 2 :]
    if len(body) != 4 or body[2] != LINE_METADATA:
        return None
    if not hmac.compare_digest(signer.sign(body), frames[index + 1]):
        return None
    content = json.loads(body[3])
    offer = content.get("host")
    host_functions = HostFunctionsMessage(**offer) if offer else None
    return LineRequest(frames[:index], body[0], content["code"], host_functions, bool(content.get("afresh")))


_REPLY_HEADER = json.dumps(
    {"msg_id": "r", "session": "r", "username": "kernel", "date": "", "msg_type": "execute_reply", "version": "5.3"}
).encode()


def encode_line_reply(request: LineRequest, content: dict[str, object], signer: MessageSigner) -> list[bytes]:
    """Return the frames of the one reply. The header bytes of the request identify what it answers."""
    body = [_REPLY_HEADER, request.header, b"{}", json.dumps(content).encode()]
    return [*request.identities, DELIMITER, signer.sign(body), *body]


def encode_host_call(line: LineRequest, number: int, content: bytes, signer: MessageSigner) -> list[bytes]:
    """Return the frames of a call that `line` makes. `number` distinguishes it from other calls of the line."""
    body = [CALL_HEADER, line.header, str(number).encode(), content]
    return [*line.identities, DELIMITER, signer.sign(body), *body]


def decode_host_reply(frames: list[bytes], line_header: bytes, signer: MessageSigner) -> tuple[int, bytes] | None:
    """Return the number and content of an answer to a call of that line, or None if `frames` are anything else."""
    if DELIMITER not in frames:
        return None
    index = frames.index(DELIMITER)
    body = frames[index + 2 :]
    if len(body) != 4 or body[0] != CALL_HEADER or body[1] != line_header:
        return None
    return (int(body[2]), body[3]) if hmac.compare_digest(signer.sign(body), frames[index + 1]) else None

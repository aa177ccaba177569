"""Requests over plain sockets, and what a server holds for them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.serve.http_server import (
    LIMIT_S,
    Server,
    question,
)

FREED_S = 1.0
"""From the moment in which a client goes away until engine and console are free."""


SERVE = (sys.executable, "-m", "repl_rl.cli", "serve", "--engine", "transformers", "--port", "0")


def freed(server: Server, since_s: float) -> None:
    server.wait(lambda: server.engine.open_sessions == server.sandbox.open == 0)
    assert time.monotonic() - since_s < FREED_S


def request(asked: Mapping[str, object]) -> bytes:
    """A turn that is asked for, as it is on the wire."""
    body = json.dumps(asked).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def sent(server: Server, **more: object) -> socket.socket:
    """A connection on which a turn was asked for."""
    connection = socket.create_connection(("127.0.0.1", urlsplit(server.address).port or 0))
    connection.sendall(request(question("Six?", **more)))
    return connection


def everything(connection: socket.socket) -> bytes:
    connection.settimeout(LIMIT_S)
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))


@contextmanager
def program(desk: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`repl-rl serve` with the bundled policy, and its address."""
    process = subprocess.Popen(
        [*SERVE, *flags], cwd=desk, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert line, process.communicate()[1].decode()
        yield process, line.split()[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

"""Reports, as a browser reads them."""

import base64
import gzip
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from repl_rl.runs.report import ReportServer


def unpacked(text: str) -> object:
    found: object = json.loads(gzip.decompress(base64.b64decode(text)))
    return found


def pick(value: object, *path: str | int) -> object:
    """The value at a path of keys and indices."""
    for key in path:
        if isinstance(value, list) and isinstance(key, int):
            value = value[key]
        else:
            assert isinstance(value, dict)
            value = value[key]
    return value


def size(value: object) -> int:
    assert isinstance(value, list)
    return len(value)


def data_of(html: str) -> dict[str, object]:
    found = re.search(r'<script id="data" type="text/plain">([A-Za-z0-9+/=]*)</script>', html)
    assert found is not None
    value = unpacked(found[1])
    assert isinstance(value, dict)
    return value


@contextmanager
def served(run: Path) -> Iterator[ReportServer]:
    with ReportServer(run) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def text(address: str) -> str:
    with urllib.request.urlopen(address) as answer:
        return str(answer.read().decode())

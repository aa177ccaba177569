"""A small hub: the part of the Hugging Face hub's HTTP interface that a download needs, on the loopback interface."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

TOKEN = "hf_good"


@dataclass
class Repository:
    """A model: a folder of files by commit, and which revisions there are."""

    files: Path
    private: bool = False
    gated: bool = False
    commit: str = ""
    broken: bool = False
    """It is known, but its files cannot be had."""

    def __post_init__(self) -> None:
        self.commit = self.commit or hashlib.sha1(str(self.files).encode()).hexdigest()


@dataclass
class Hub:
    """Its models by name, and what was asked."""

    models: Mapping[str, Repository]
    asked: list[str] = field(default_factory=list)
    address: str = ""
    status: int = 200
    """Answer everything with this instead, unless it is 200."""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve it; its address is there within the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _answer(hub, self)

        def do_HEAD(self) -> None:
            _answer(hub, self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        hub.address = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def _answer(hub: Hub, to: BaseHTTPRequestHandler) -> None:
    parts = [unquote(part) for part in urlsplit(to.path).path.strip("/").split("/")]
    hub.asked.append(f"{to.command} {'/'.join(parts)}")
    if hub.status != 200:
        return _send(to, hub.status, {"error": "out of order"})
    of_api = parts[:2] == ["api", "models"]
    owner, name, *rest = parts[2:] if of_api else parts
    model, token = hub.models.get(f"{owner}/{name}"), to.headers.get("Authorization")
    if token not in (None, f"Bearer {TOKEN}"):
        said = "Invalid credentials in Authorization header"
        return _send(to, 401, {"error": said}, {"X-Error-Message": said})
    if model is None or (model.private and token is None):
        return _send(to, 404 if token else 401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
    revision = rest[1] if len(rest) > 1 else "main"
    if revision not in ("main", "v1", model.commit):
        said = f"Invalid rev id: {revision}"
        return _send(to, 404, {"error": said}, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": said})
    if of_api and rest[:1] == ["tree"]:
        return _send(to, 200, [_entry(model, file) for file in _files(model)])
    if of_api:
        return _send(to, 200, {"id": f"{owner}/{name}", "sha": model.commit, "siblings": [], "tags": []})
    if model.gated and token is None:
        return _send(to, 401, {"error": "Access is restricted"}, {"X-Error-Code": "GatedRepo"})
    return _send_file(to, model, model.files.joinpath(*rest[2:]))


def _files(model: Repository) -> list[Path]:
    return sorted(file for file in model.files.rglob("*") if file.is_file())


def _entry(model: Repository, file: Path) -> dict[str, object]:
    path = file.relative_to(model.files).as_posix()
    return {"type": "file", "path": path, "size": file.stat().st_size, "oid": _tag(file)}


def _tag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


def _send(to: BaseHTTPRequestHandler, status: int, what: object, headers: Mapping[str, str] | None = None) -> None:
    body = json.dumps(what).encode()
    to.send_response(status)
    for name, value in {**(headers or {}), "Content-Type": "application/json"}.items():
        to.send_header(name, value)
    to.send_header("Content-Length", str(len(body)))
    to.end_headers()
    if to.command == "GET":
        to.wfile.write(body)


def _send_file(to: BaseHTTPRequestHandler, model: Repository, file: Path) -> None:
    if model.broken or not file.is_file():
        return _send(to, 404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
    body = file.read_bytes()
    to.send_response(200)
    to.send_header("ETag", f'"{_tag(file)}"')
    to.send_header("X-Repo-Commit", model.commit)
    to.send_header("Content-Length", str(len(body)))
    to.end_headers()
    if to.command == "GET":
        to.wfile.write(body)
    return None

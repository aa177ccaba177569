"""Follow a running training in the browser: the report of a run folder, made anew when the run has got on.

It listens on the loopback interface only, and answers only addresses that begin with a token drawn at its start: other
users of the machine, and pages of other sites in the same browser, do not know it.
"""

import hmac
import secrets
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import urlsplit

from repl_rl.runs.report.data import payload
from repl_rl.runs.report.page import page
from repl_rl.runs.report.rollouts import pack

_HOSTS = ("127.0.0.1", "localhost")


class ReportServer(ThreadingHTTPServer):
    """Serves the report of one run folder at `address` until it is shut down.

    Raises:
        StoreError: `run` is no run folder.
        OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, run: Path, port: int = 0) -> None:
        self.run = run
        self.token = secrets.token_urlsafe(24)
        self._lock = Lock()
        self._made: tuple[str, str, str] = ("", "", "")
        self.made()
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def address(self) -> str:
        """What to open, token included."""
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def made(self) -> tuple[str, str, str]:
        """(version, page, packed data) of what is on disk now; the version changes with each finished step."""
        with self._lock:
            version = "-".join(_stamp(self.run / name) for name in ("metrics.jsonl", "summary.json"))
            if version != self._made[0]:
                data = payload(self.run)
                self._made = (version, page(data, follow=True), pack(data))
            return self._made


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        """`/TOKEN/` is the page, `/TOKEN/version` and `/TOKEN/data` are what it asks for later."""
        _, token, name = (*urlsplit(self.path).path.split("/", 2), "", "")[:3]
        host = self.headers.get("Host", "").rpartition(":")[0]
        known = hmac.compare_digest(token.encode(), self.server.token.encode())
        if host not in _HOSTS or not known or name not in ("", "version", "data"):
            self._answer(404, "text/plain", "nothing here: open the whole address that repl-rl view printed\n")
            return
        version, html, data = self.server.made()
        body = {"": html, "version": version, "data": data}[name]
        self._answer(200, "text/plain" if name else "text/html; charset=utf-8", body)

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


def _stamp(path: Path) -> str:
    return f"{path.stat().st_mtime_ns}.{path.stat().st_size}" if path.exists() else "0"

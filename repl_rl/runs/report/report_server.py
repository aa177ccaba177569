"""Local web server for the report of a running training; it renders the report again after each finished step.

It listens only on the loopback interface. It answers only addresses that begin with a random token drawn at its start.
Other users of the machine and pages of other sites in the same browser do not know the token.
"""

import hmac
import secrets
import sys
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import urlsplit

from repl_rl.errors import ReplRLError
from repl_rl.runs.report.render_report import render_page
from repl_rl.runs.report.report_data import build_payload, pack_json
from repl_rl.runs.store import escape_control_characters

_HOSTS = ("127.0.0.1", "localhost")
"""Host names of requests that are answered."""


class ReportServer(ThreadingHTTPServer):
    """HTTP server that serves the report of one run folder at `address` until shutdown.

    Raises:
        StoreError: `run` is not a run folder.
        OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, run: Path, port: int = 0) -> None:
        self.run = run
        self.token = secrets.token_urlsafe(24)
        self._lock = Lock()
        self._rendered: tuple[str, str, str] = ("", "", "")
        self._reported = ""
        self.render_if_changed()
        super().__init__(("127.0.0.1", port), _ReportRequestHandler)

    @property
    def address(self) -> str:
        """URL of the page, with the token."""
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def render_if_changed(self) -> tuple[str, str, str]:
        """Return (version, page, packed data) of the current files; the version changes with each finished step."""
        with self._lock:
            # The lock lets one request render the page while others wait for the result.
            version = "-".join(_get_file_version(self.run / name) for name in ("metrics.jsonl", "summary.json"))
            if version != self._rendered[0]:
                data = build_payload(self.run)
                self._rendered = (version, render_page(data, follow=True), pack_json(data))
            return self._rendered

    def report(self, error: Exception) -> None:
        """Print an error, unless it was the last one that was printed: the page asks again every few seconds."""
        line = " ".join(str(error).split())
        with self._lock:
            if line != self._reported:
                self._reported = line
                print(f"repl-rl: {escape_control_characters(line)}", file=sys.stderr, flush=True)


class _ReportRequestHandler(BaseHTTPRequestHandler):
    """Handler of the page's requests."""

    server: ReportServer

    def handle(self) -> None:
        """Answer the requests of a connection. A browser may leave before it has its answer."""
        with suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        """Serve the page at `/TOKEN/`, and its later requests at `/TOKEN/version` and `/TOKEN/data`."""
        _, token, name = (*urlsplit(self.path).path.split("/", 2), "", "")[:3]
        # A page of another site may reach this port by DNS rebinding, but its Host header then names that site.
        host = self.headers.get("Host", "").rpartition(":")[0]
        token_matches = hmac.compare_digest(token.encode(), self.server.token.encode())
        if host not in _HOSTS or not token_matches or name not in ("", "version", "data"):
            self._send_response(404, "text/plain", "nothing here: open the whole address that repl-rl view printed\n")
            return
        try:
            version, html, data = self.server.render_if_changed()
        except (ReplRLError, OSError) as error:
            # The run may have been removed, or one of its files may be damaged.
            self.server.report(error)
            self._send_response(503, "text/plain; charset=utf-8", f"{error}\n")
            return
        # The page asks for the version, and for the data once the version has changed.
        body = {"": html, "version": version, "data": data}[name]
        self._send_response(200, "text/plain" if name else "text/html; charset=utf-8", body)

    def _send_response(self, code: int, kind: str, text: str) -> None:
        """Send a text that no browser stores, embeds, or guesses another type for."""
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
        """Log no requests."""


def _get_file_version(path: Path) -> str:
    """Return a text that changes whenever the file does."""
    return f"{path.stat().st_mtime_ns}.{path.stat().st_size}" if path.exists() else "0"

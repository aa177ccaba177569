"""A process that owns the kernels of one run on a Jupyter server: whatever ends the run, it ends them.

Lines of JSON come on its standard input: first the server, then requests, each answered by a line. At the end of input,
which comes by our SIGKILL too, it ends every kernel that was started and not ended. It is run by its path, and imports
the standard library only.
"""

import json
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

Said: TypeAlias = dict[str, object]

_REQUEST_S = 60.0
_AT_ONCE = 8
_SHOWN_CHARS = 300


class Owner:
    """Talks to the server, and knows which kernels live."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if token:
            self._headers["Authorization"] = f"token {token}"
        self._kernels: set[str] = set()
        self._lock = threading.Lock()

    def ask(self, method: str, path: str, content: Said | None = None) -> Said:
        """The server's answer: `status` 0 where there was none; `said` or `error`."""
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"{self._url}/api/{path}", body, self._headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_REQUEST_S) as response:
                text = response.read()
                return {"status": response.status, "said": json.loads(text) if text else None}
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")
            return {"status": error.code, "error": f"{error.reason} {text}"[:_SHOWN_CHARS]}
        except ValueError as error:
            return {"status": 200, "error": f"no JSON: {error}"[:_SHOWN_CHARS]}
        except OSError as error:
            return {"status": 0, "error": str(error)[:_SHOWN_CHARS]}

    def start(self, kernel: str) -> Said:
        """Start a kernel, the server's own choice where no name is given."""
        answer = self.ask("POST", "kernels", {"name": kernel} if kernel else {})
        model = answer.get("said")
        if isinstance(model, dict) and isinstance(model.get("id"), str):
            with self._lock:
                self._kernels.add(model["id"])
        return answer

    def end(self, kernel_id: str) -> Said:
        """End a kernel. One of which the server knows nothing has ended."""
        answer = self.ask("DELETE", f"kernels/{kernel_id}")
        if answer["status"] in (200, 204, 404):
            with self._lock:
                self._kernels.discard(kernel_id)
        return answer

    def end_all(self) -> None:
        """End what is left."""
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(self.end, list(self._kernels)))


def _answer(owner: Owner, asked: Said, writing: threading.Lock) -> None:
    if asked["do"] == "start":
        answer = owner.start(str(asked["what"]))
    elif asked["do"] == "end":
        answer = owner.end(str(asked["what"]))
    else:
        answer = owner.ask("GET", str(asked["what"]))
    try:
        with writing:
            print(json.dumps({**answer, "number": asked["number"]}), flush=True)
    except OSError:  # nobody listens any more
        return


def serve() -> None:
    """Answer until the end of input, then end what is left."""
    server = json.loads(sys.stdin.readline())
    owner, writing = Owner(server["url"], server["token"]), threading.Lock()
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for line in sys.stdin:
            threads.submit(_answer, owner, json.loads(line), writing)
    owner.end_all()


if __name__ == "__main__":
    serve()

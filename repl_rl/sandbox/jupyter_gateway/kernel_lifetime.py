"""Process that owns the kernels of one run on a Jupyter server, and ends them however the run ends.

It reads lines of JSON from standard input: first the server's address and token, then requests. It answers each request
with a line. At the end of input it ends every kernel that still runs. If the parent process is killed, the input ends,
too. This file is started by its path, and imports the standard library only.
"""

import http.client
import json
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

OwnerMessage: TypeAlias = dict[str, object]

_REQUEST_S = 60.0
_AT_ONCE = 8
_SHOWN_CHARS = 300
_ANSWER_BYTES = 4_000_000
"""Maximum size of an answer of the server. As a line of JSON it may become four times as long."""


class KernelOwner:
    """Client of the server that tracks which kernels run."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if token:
            self._headers["Authorization"] = f"token {token}"
        # Requests run in several threads, so a lock guards the set.
        self._kernels: set[str] = set()
        self._lock = threading.Lock()

    def send_request(self, method: str, path: str, content: OwnerMessage | None = None) -> OwnerMessage:
        """Return the status of the server's answer, and its content or an error. Status 0 means no answer."""
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"{self._url}/api/{path}", body, self._headers, method=method)
        try:
            return _fetch_json(request)
        except (ValueError, RecursionError) as error:
            return {"status": 200, "error": f"no JSON: {error}"[:_SHOWN_CHARS]}
        except http.client.HTTPException as error:
            return {"status": 0, "error": f"no HTTP: {error!r}"[:_SHOWN_CHARS]}
        except OSError as error:
            return {"status": 0, "error": str(error)[:_SHOWN_CHARS]}

    def start_kernel(self, kernel: str) -> OwnerMessage:
        """Start a kernel. An empty name means the server's default."""
        answer = self.send_request("POST", "kernels", {"name": kernel} if kernel else {})
        model = answer.get("said")
        if isinstance(model, dict) and isinstance(model.get("id"), str):
            with self._lock:
                self._kernels.add(model["id"])
        return answer

    def end_kernel(self, kernel_id: str) -> OwnerMessage:
        """End a kernel. A kernel that the server does not know has ended."""
        answer = self.send_request("DELETE", f"kernels/{kernel_id}")
        if answer["status"] in (200, 204, 404):
            with self._lock:
                self._kernels.discard(kernel_id)
        return answer

    def end_all_kernels(self) -> None:
        """End all kernels that still run."""
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(self.end_kernel, list(self._kernels)))


def _fetch_json(request: urllib.request.Request) -> OwnerMessage:
    try:
        with urllib.request.urlopen(request, timeout=_REQUEST_S) as response:
            status, text = response.status, response.read(_ANSWER_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(_SHOWN_CHARS).decode("utf-8", "replace")
        return {"status": error.code, "error": f"{error.reason} {text}"[:_SHOWN_CHARS]}
    if len(text) > _ANSWER_BYTES:
        return {"status": status, "error": f"its answer is longer than {_ANSWER_BYTES} bytes"}
    return {"status": status, "said": json.loads(text) if text else None}


def _handle_request(owner: KernelOwner, request: OwnerMessage, print_lock: threading.Lock) -> None:
    if request["do"] == "start":
        answer = owner.start_kernel(str(request["what"]))
    elif request["do"] == "end":
        answer = owner.end_kernel(str(request["what"]))
    else:
        answer = owner.send_request("GET", str(request["what"]))
    try:
        line = json.dumps({**answer, "number": request["number"]})
    except RecursionError:
        # It could be parsed, but the line is nested one level deeper.
        problem = "no JSON: it is nested too deeply"
        line = json.dumps({"status": answer["status"], "error": problem, "number": request["number"]})
    try:
        with print_lock:
            print(line, flush=True)
    except OSError:
        # The reader is gone.
        return


def run_owner() -> None:
    """Answer requests until the end of input, then end all kernels that still run."""
    server = json.loads(sys.stdin.readline())
    owner, print_lock = KernelOwner(server["url"], server["token"]), threading.Lock()
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for line in sys.stdin:
            threads.submit(_handle_request, owner, json.loads(line), print_lock)
    owner.end_all_kernels()


if __name__ == "__main__":
    run_owner()

"""A real browser for tests: headless Chromium, driven over its DevTools protocol."""

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from websockets.sync.client import ClientConnection, connect

BINARY = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)

FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
    "--remote-debugging-port=0", "--disable-extensions", "--disable-component-update",
    "--disable-background-networking", "--disable-sync",
    "--disable-features=IsolateSandboxedIframes",  # or a frame would be a target of its own
]  # fmt: skip

SHIFT = 8
"""A modifier of `Tab.press`."""


class Tab:
    """One page. What it logs as an error, and every address that it asks for, is kept."""

    def __init__(self, socket: ClientConnection, offline: bool) -> None:
        self._socket = socket
        self._number = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        if offline:
            self.send(
                "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
            )

    def send(self, method: str, **params: object) -> dict[str, object]:
        """Call a method of the protocol; return its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                result: dict[str, object] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, object]) -> None:
        params = message.get("params", {})
        assert isinstance(params, dict)
        if message["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
        elif message["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(json.dumps(params["args"])[:2000])
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif message["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def run(self, script: str) -> object:
        """The value of an expression of the page; a promise is awaited."""
        done = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        result = done["result"]
        assert isinstance(result, dict)
        return result.get("value")

    def open(self, address: str, size: tuple[int, int] = (1360, 900), dark: bool = False) -> None:
        """Load a page and wait until it has loaded."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def wait(self, condition: str, limit_s: float = 30) -> None:
        """Wait until an expression of the page is true."""
        deadline = time.monotonic() + limit_s
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"{condition} did not come true; errors: {self.errors}"
            self.run("new Promise(done => setTimeout(done, 30))")

    def click(self, selector: str) -> None:
        """Click the first element of a CSS selector."""
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, selector: str, text: str) -> None:
        """Put text into a field as a person would."""
        chosen = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{chosen}.focus(), {chosen}.value = '', 0")
        self.send("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press and release a key. With `SHIFT`, while that is held."""
        code = {"Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}.get(key, ord(key[0].upper()))
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        for kind in ("keyDown", "keyUp"):
            facts = {"key": key, "code": key, "text": text, "windowsVirtualKeyCode": code, "modifiers": modifiers}
            self.send("Input.dispatchKeyEvent", type=kind, **facts)

    def mouse(self, element: str, *across: float) -> None:
        """Click an element, given as an expression of the page: press at the first of `across`, a share of its width,
        release at the last; in its middle if none is given."""
        self.run(f"{element}.scrollIntoView({{block: 'nearest'}})")
        box = self.run(f"(r => [r.left, r.top, r.width, r.height])({element}.getBoundingClientRect())")
        assert isinstance(box, list)
        left, top, width, height = box
        spots = across or (0.5,)
        kinds = ["mousePressed", *["mouseMoved"] * (len(spots) - 1), "mouseReleased"]
        for kind, share in zip(kinds, [*spots, spots[-1]], strict=True):
            facts = {"x": left + share * width, "y": top + height / 2, "button": "left", "buttons": 1, "clickCount": 1}
            self.send("Input.dispatchMouseEvent", type=kind, **facts)

    def text(self, selector: str) -> str:
        """What a person reads in the first element of a CSS selector."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def count(self, selector: str) -> int:
        """How many elements a CSS selector finds."""
        found = self.run(f"document.querySelectorAll({json.dumps(selector)}).length")
        assert isinstance(found, int)
        return found

    def framed(self) -> str:
        """What a person reads in the page's first frame."""
        tree = self.send("Page.getFrameTree")["frameTree"]
        assert isinstance(tree, dict)
        world = self.send("Page.createIsolatedWorld", frameId=tree["childFrames"][0]["frame"]["id"])
        script = {"expression": "document.body.innerText", "contextId": world["executionContextId"]}
        result = self.send("Runtime.evaluate", **script)["result"]
        assert isinstance(result, dict)
        return str(result["value"])

    def screenshot(self, path: Path, element: str = "") -> None:
        """Write what is seen as a PNG: all of the page, or an element, given as an expression of the page."""
        clip: dict[str, object] = {}
        if element:
            box = self.run(
                f"(r => ({{x: r.x, y: r.y, width: r.width, height: r.height}}))({element}.getBoundingClientRect())"
            )
            assert isinstance(box, dict)
            clip = {"clip": {**box, "scale": 1}}
        data = self.send("Page.captureScreenshot", format="png", **clip)["data"]
        path.write_bytes(base64.b64decode(str(data)))


@contextmanager
def chromium(offline: bool = True) -> Iterator[Tab]:
    """A fresh browser with one empty page; with `offline` it has no network. It is gone afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [*FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen([BINARY, *flags], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        try:
            assert process.stderr is not None
            address = next(line.split()[-1] for line in process.stderr if line.startswith("DevTools listening"))
            with connect(address, max_size=None) as socket:
                target = _call(socket, "Target.createTarget", {"url": "about:blank"})["targetId"]
            page = address.rsplit("/devtools/", 1)[0] + f"/devtools/page/{target}"
            with connect(page, max_size=None) as socket:
                yield Tab(socket, offline)
        finally:
            process.terminate()
            process.wait(timeout=20)


def _call(socket: ClientConnection, method: str, params: dict[str, str]) -> dict[str, str]:
    socket.send(json.dumps({"id": 1, "method": method, "params": params}))
    while True:
        message = json.loads(socket.recv(timeout=60))
        if message.get("id") == 1:
            result: dict[str, str] = message["result"]
            return result

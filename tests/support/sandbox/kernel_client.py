"""A plain Jupyter client of our installed kernel, as a test needs it."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from repl_rl.sandbox import jupyter_kernelspec as jupyter

TIMEOUT_S = 60.0
Content = dict[str, object]


@contextmanager
def installed(folder: Path, *, isolated: bool) -> Iterator[None]:
    """While it is open, Jupyter finds our kernel by its name, and nothing of the person who runs the tests."""
    data = jupyter.get_data_folder(folder)
    jupyter.install_kernelspec(data, isolated=isolated)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("JUPYTER_PATH", os.fspath(data))
        environment.setenv("JUPYTER_DATA_DIR", os.fspath(folder / "data"))
        environment.setenv("JUPYTER_RUNTIME_DIR", os.fspath(folder / "runtime"))
        yield


@dataclass(frozen=True)
class Ran:
    """What a client saw of one request."""

    reply: Content
    outputs: list[tuple[str, Content]]
    """Types and contents of what was published in between, but for status and execute_input."""

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.outputs]

    def text(self, stream: str) -> str:
        """All of one stream."""
        parts = [content["text"] for kind, content in self.outputs if kind == "stream" and content["name"] == stream]
        return "".join(map(str, parts))

    def data(self, kind: str) -> list[dict[str, object]]:
        """Data by MIME type, of each message of a kind."""
        return [dict(content["data"]) for found, content in self.outputs if found == kind]  # type: ignore[call-overload]


@dataclass(frozen=True)
class Client:
    """A kernel that runs, and its client."""

    manager: KernelManager
    client: BlockingKernelClient

    def run(self, code: str, **options: object) -> Ran:
        """Run a cell to its end."""
        return self.finish(self.client.execute(code, **options))

    def finish(self, msg_id: str) -> Ran:
        """Wait for the reply to a request, and for all that it publishes."""
        outputs = []
        while True:
            kind, content = self.published(msg_id)
            if kind == "status" and content["execution_state"] == "idle":
                break
            if kind not in ("status", "execute_input"):
                outputs.append((kind, content))
        return Ran(self.reply(msg_id), outputs)

    def published(self, msg_id: str) -> tuple[str, Content]:
        """Type and content of the next message that a request publishes."""
        while True:
            message = self.client.get_iopub_msg(timeout=TIMEOUT_S)
            if message["parent_header"].get("msg_id") == msg_id:
                return message["msg_type"], message["content"]

    def reply(self, msg_id: str) -> Content:
        """The content of the reply to a request."""
        while True:
            message = self.client.get_shell_msg(timeout=TIMEOUT_S)
            if message["parent_header"].get("msg_id") == msg_id:
                content: Content = message["content"]
                return content

    def wait_for(self, msg_id: str, text: str) -> None:
        """Until a request has printed `text`."""
        seen = ""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in seen:
            assert time.monotonic() < deadline
            kind, content = self.published(msg_id)
            seen += str(content["text"]) if kind == "stream" else ""

    def interrupt_by_message(self) -> Content:
        """Send an interrupt_request; returns the content of its reply."""
        self.client.control_channel.send(self.client.session.msg("interrupt_request", {}))
        content: Content = self.client.get_control_msg(timeout=TIMEOUT_S)["content"]
        return content


@contextmanager
def launched() -> Iterator[KernelManager]:
    """A kernel started by its name, as `jupyter_client` documents it."""
    manager = KernelManager(kernel_name=jupyter.NAME)
    manager.start_kernel()
    try:
        yield manager
    finally:
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


@contextmanager
def started() -> Iterator[Client]:
    """Such a kernel, and a client that it has answered."""
    with launched() as manager:
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=TIMEOUT_S)
            yield Client(manager, client)
        finally:
            client.stop_channels()

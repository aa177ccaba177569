"""The websocket to one kernel, through Jupyter's own client of it: code goes in, a value comes out."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from queue import Empty
from typing import TypeAlias

from jupyter_kernel_client.wsclient import KernelWebSocketClient

from repl_rl.errors import SandboxFault, SandboxLost
from repl_rl.sandbox.gateway.address import Address

_LOOK_S = 0.02
"""How often a thread that waits for a reply looks whether the kernel asks something, or is gone."""
_CONNECT_S = 30.0
_log = logging.getLogger(__name__)
Content: TypeAlias = Mapping[str, object]


class KernelDied(Exception):
    """The kernel's own process ended; its server lives."""


class KernelLink:
    """One kernel. All methods but `close` block: call them in a thread, one at a time."""

    def __init__(self, address: Address, kernel_id: str) -> None:
        channels = f"ws{address.url.removeprefix('http')}/api/kernels/{kernel_id}/channels"
        headers = {"Authorization": f"token {address.token}"} if address.token else {}
        self._client = KernelWebSocketClient(channels, headers=headers, timeout=_CONNECT_S, log=_log)
        self._closed = False

    @property
    def open(self) -> bool:
        """False once the connection is lost, or closed."""
        return not self._closed and bool(self._client.connection_ready.is_set())

    def connect(self) -> None:
        """Open the websocket.

        Raises:
            SandboxLost: the server cannot be reached.
        """
        self._client.start_channels()
        if not self.open:
            raise SandboxLost("the Jupyter server accepts no websocket to its kernel")

    def ask(self, code: str, value: str, limit_s: float, answer: Callable[[str], str]) -> str:
        """Run `code`, then the `repr` of what `value` names there. `answer`: what the kernel's `input` returns.

        Raises:
            SandboxLost: the connection is gone, or nothing came in time.
            KernelDied: the kernel's process ended meanwhile.
            SandboxFault: the code raises there.
        """
        if not self.open:
            raise SandboxLost("the connection to the Jupyter server is gone, and the console with it")
        asked = self._client.execute(code, silent=True, user_expressions={"said": value}, allow_stdin=True)
        content = self._reply(asked, limit_s, answer)
        wrong = content
        if content.get("status") == "ok":
            wrong = _table(_table(content, "user_expressions"), "said")
            if wrong.get("status") == "ok":
                return str(_table(wrong, "data").get("text/plain"))
        raise SandboxFault(f"the kernel says {wrong.get('ename')}: {wrong.get('evalue')}")

    def _reply(self, asked: str, limit_s: float, answer: Callable[[str], str]) -> Content:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                reply = self._client.shell_channel.get_msg(timeout=_LOOK_S)
            except Empty:
                self._refuse_gone()
            else:
                if reply["parent_header"].get("msg_id") == asked:
                    content: Content = reply["content"]
                    return content
            for question in self._client.stdin_channel.get_msgs():
                if question["parent_header"].get("msg_id") == asked:
                    begun = time.monotonic()
                    self._client.input(answer(str(question["content"]["prompt"])))
                    deadline += time.monotonic() - begun
            if time.monotonic() > deadline:
                raise SandboxLost(f"the Jupyter server has not answered for {limit_s:g} s")

    def _refuse_gone(self) -> None:
        """
        Raises:
            SandboxLost, KernelDied: nobody will reply any more.
        """
        for message in self._client.iopub_channel.get_msgs():
            if message["content"].get("execution_state") in ("restarting", "dead"):
                raise KernelDied
        if not self.open:
            raise SandboxLost("the connection to the Jupyter server is gone, and the console with it")

    def close(self) -> None:
        """Let go of the websocket. Not from its own thread."""
        self._closed = True
        self._client.stop_channels()


def _table(content: Content, name: str) -> Content:
    """A table that a kernel's reply should have; an empty one where it has none."""
    found = content.get(name)
    return found if isinstance(found, Mapping) else {}


def parsed(said: str) -> dict[str, object]:
    """What a relay said.

    Raises:
        SandboxFault: it is no such thing.
    """
    try:
        value = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise SandboxFault(f"a relay said {said[:80]!r}") from error
    if not isinstance(value, dict):
        raise SandboxFault(f"a relay said {said[:80]!r}")
    return value

"""Websocket to one kernel, through Jupyter's own client: runs code and returns a value."""

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
"""Interval at which a thread that waits for a reply checks for questions and for the end of the kernel, seconds."""
_CONNECT_S = 30.0
_log = logging.getLogger(__name__)
Content: TypeAlias = Mapping[str, object]


class KernelDied(Exception):
    """Error for a kernel whose own process ended while its server lives."""


class KernelLink:
    """Connection to one kernel. All methods except `close` block, so call them in a thread, one by one."""

    def __init__(self, address: Address, kernel_id: str) -> None:
        channels = f"ws{address.url.removeprefix('http')}/api/kernels/{kernel_id}/channels"
        headers = {"Authorization": f"token {address.token}"} if address.token else {}
        self._client = KernelWebSocketClient(channels, headers=headers, timeout=_CONNECT_S, log=_log)
        self._closed = False

    @property
    def open(self) -> bool:
        """False once the connection is lost or closed."""
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
        """Run `code`, then return the `repr` of the expression `value`. `answer` gives the results of the kernel's
        `input`.

        Raises:
            SandboxLost: the connection is gone, or no reply came in time.
            KernelDied: the kernel's process ended meanwhile.
            SandboxFault: the code raised an exception.
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
                if _table(reply, "parent_header").get("msg_id") == asked:
                    return _table(reply, "content")
            # Questions of the kernel are calls of host functions.
            for question in self._client.stdin_channel.get_msgs():
                if _table(question, "parent_header").get("msg_id") == asked:
                    prompt = _table(question, "content").get("prompt")
                    if not isinstance(prompt, str):
                        raise SandboxFault("the kernel asks without a prompt")
                    # The time of the host's answer does not count towards the limit.
                    begun = time.monotonic()
                    self._client.input(answer(prompt))
                    deadline += time.monotonic() - begun
            if time.monotonic() > deadline:
                raise SandboxLost(f"the Jupyter server has not answered for {limit_s:g} s")

    def _refuse_gone(self) -> None:
        """Raise an exception if no reply can come any more.

        Raises:
            SandboxLost: the connection is gone.
            KernelDied: the kernel's process ended.
        """
        for message in self._client.iopub_channel.get_msgs():
            if _table(message, "content").get("execution_state") in ("restarting", "dead"):
                raise KernelDied
        if not self.open:
            raise SandboxLost("the connection to the Jupyter server is gone, and the console with it")

    def close(self) -> None:
        """Close the websocket. Do not call this in the websocket's own thread."""
        self._closed = True
        self._client.stop_channels()


def _table(content: Content, name: str) -> Content:
    """Return a table of a kernel's message.

    Raises:
        SandboxFault: it is missing, or no table.
    """
    found = content.get(name)
    if not isinstance(found, Mapping):
        raise SandboxFault(f"a message of the kernel has no table {name!r}")
    return found


def parsed(said: str) -> dict[str, object]:
    """Parse the reply of a relay.

    Raises:
        SandboxFault: it is not a JSON object.
    """
    try:
        value = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise SandboxFault(f"a relay said {said[:80]!r}") from error
    if not isinstance(value, dict):
        raise SandboxFault(f"a relay said {said[:80]!r}")
    return value

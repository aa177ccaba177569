"""Checks of host functions that lines call, for every sandbox that offers them."""

import json
from dataclasses import dataclass

from repl_rl.record.trajectory import LineStatus
from repl_rl.sandbox.base import Calling, Sandbox


@dataclass(frozen=True, slots=True)
class HostCheck:
    """Lines, and the expected end of the last one."""

    name: str
    lines: tuple[str, ...]
    status: LineStatus
    shows: str


HOST_CHECKS = (
    HostCheck("a call", ("add(1, 2)",), LineStatus.OK, "3\n"),
    HostCheck("an error of the host", ("add('x')",), LineStatus.EXCEPTION, "HostError: numbers, please\n"),
    HostCheck(
        "calls from threads",
        ("from concurrent.futures import ThreadPoolExecutor as Pool", "sum(Pool(2).map(add, range(8)))"),
        LineStatus.OK,
        "28\n",
    ),
    HostCheck("100 MB of arguments", ("add('x' * 10**8)",), LineStatus.EXCEPTION, "are allowed\n"),
    HostCheck(
        "a call from a child process",
        ("import os", "if os.fork() == 0: add(1)", "else: _ = os.wait()", ""),
        LineStatus.OK,
        "HostError: add() cannot be called from a child process",
    ),
)


class Adder:
    """Host that adds numbers."""

    functions = {"add": "add(*numbers)"}  # noqa: RUF012
    argument_bytes = 4096

    async def answer(self, call: bytes) -> bytes:
        """As `Host.answer`."""
        numbers = json.loads(call)["args"]
        if not all(isinstance(number, int) for number in numbers):
            return b'{"error": "numbers, please"}'
        return json.dumps({"answer": sum(numbers)}).encode()


async def run_host_check(sandbox: Sandbox, check: HostCheck) -> str:
    """Return an empty string if the check passes, else the result of the last line."""
    async with sandbox.session() as session:
        if not isinstance(session, Calling):
            return "its sessions have no `offer`"
        session.offer(Adder())
        for line in check.lines:
            result = await session.push(line)
        good = result.status is check.status and check.shows in result.text
        return "" if good else f"{result.status.value}: {result.text[-200:]!r}"

"""A console that begins with a workspace: it is made once, and every console has it for itself."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from repl_rl.errors import ConfigError, SandboxFault, SetupError
from repl_rl.sandbox import InProcessSandbox, Limits, Sandbox, open_sandbox
from repl_rl.sandbox.base import SandboxSession, SupportsWorkspace, open_console
from repl_rl.sandbox.conformance import WORKSPACE_LIMITS, check_workspaces
from repl_rl.sandbox.conformance.limits_and_workspaces import WORKSPACE_CHECKS, run_workspace_check
from repl_rl.sandbox.fork_server_client import IDLE, WorkspacePool
from repl_rl.tasks import Workspace
from repl_rl.trajectory.trajectory import LineStatus
from repl_rl.utils.package_data import find_asset
from tests.support.processes import command, wait_for

LIMITS = replace(Limits(), line_timeout_s=2.0, cpu_s=4.0, interrupt_grace_s=5.0)
TABLE = Workspace(
    values={"rows": [[n, f"name {n}"] for n in range(100)], "limit": 3},
    files={"data/a.csv": b"a,b\n1,2\n"},
    lines=(
        "import csv",
        "",
        "def first():",
        "    return rows[0]",
        "",
        "    # the end",
        "total = sum(n for n, _ in rows)",
    ),
    preload=("statistics",),
)


@asynccontextmanager
async def opened(kind: str) -> AsyncIterator[Sandbox]:
    if kind == "inprocess":
        yield InProcessSandbox(LIMITS)
        return
    async with open_sandbox(kind, limits=LIMITS, warm=0) as sandbox:
        yield sandbox


async def said(session: SandboxSession, *lines: str) -> list[str]:
    return [(await session.push(line)).text for line in lines]


def within(kind: str, body: Callable[[Sandbox], Awaitable[None]]) -> None:
    async def main() -> None:
        async with opened(kind) as sandbox:
            await body(sandbox)

    asyncio.run(main())


every_kind = pytest.mark.parametrize("kind", ["local", "unsafe", "inprocess"])
served_kinds = pytest.mark.parametrize("kind", ["local", "unsafe"])


@every_kind
def test_values_modules_and_what_lines_defined_are_there_before_the_first_line(kind: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        async with open_console(sandbox, replace(TABLE, files={})) as session:
            texts = await said(session, "len(rows), limit, total", "first()", "import sys; 'statistics' in sys.modules")
        assert texts == ["(100, 3, 4950)\n", "[0, 'name 0']\n", "True\n"]

    within(kind, body)


@served_kinds
def test_files_lie_in_the_working_folder_and_lines_may_write_more(kind: str) -> None:
    setup = Workspace(files={"a/b.txt": b"text\n"}, lines=("open('made', 'w').write(open('a/b.txt').read() * 2)", ""))

    async def body(sandbox: Sandbox) -> None:
        async with open_console(sandbox, setup) as session:
            texts = await said(
                session, "import os; sorted(os.listdir())", "open('a/b.txt').read(), open('made').read()"
            )
        assert texts == ["['a', 'made']\n", "('text\\n', 'text\\ntext\\n')\n"]

    within(kind, body)


@every_kind
def test_an_error_in_a_line_is_refused_with_its_text(kind: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(SetupError, match="division by zero"):
            async with open_console(sandbox, Workspace(lines=("x = 1", "y = x / 0"))):
                pass

    within(kind, body)


ENDED = "os.fork() or os._exit(0)"
AWAITED = "os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)"
RUNNING = "os.fork() or os.read(os.pipe()[0], 1)"
"""Reads what nobody writes."""


@served_kinds
def test_a_refusal_names_the_line_the_file_or_the_module(kind: str) -> None:
    bad = {
        "line 2 is 'y = x / 0'; it raises ZeroDivisionError": Workspace(lines=("x = 1", "y = x / 0")),
        "preload is 'no_such_module'; it cannot be imported": Workspace(preload=("no_such_module",)),
        "file large is '20000000 bytes'; it cannot be written": Workspace(files={"large": bytes(20_000_000)}),
        "line 1 is 'while True: pass'; it took too long": Workspace(lines=("while True: pass",)),
        "line 1 is 'x = bytearray(10 ** 9)'; it raises MemoryError": Workspace(lines=("x = bytearray(10 ** 9)",)),
        "it is still open, and all consoles would share it": Workspace(lines=("f = open('f', 'w')",)),
        "it still runs, and no console would see it": Workspace(lines=("import os", ENDED, AWAITED, RUNNING)),
    }

    async def body(sandbox: Sandbox) -> None:
        for message, setup in bad.items():
            with pytest.raises(SetupError, match=re.escape(message)):
                async with open_console(sandbox, setup):
                    pass

    within(kind, body)


def test_the_limit_of_cpu_time_names_the_line_that_reached_it(tmp_path: Path) -> None:
    said = {"files": {}, "preload": [], "values": {}, "lines": ["x = 1", "while True: pass"]}
    program = f"""
import json, resource, signal
resource.setrlimit(resource.RLIMIT_CPU, (2, 100))
from repl_kernel import workspace_setup
try:
    workspace_setup.build_workspace({json.dumps(said).encode()!r})
except workspace_setup.WorkspaceRefused as refused:
    print(refused.location, refused.value, refused, sep="; ", end="")
assert signal.getsignal(signal.SIGXCPU) is signal.SIG_DFL
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(find_asset("sandbox"))}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("line 2; while True: pass; it took too long", 0), done.stderr


@served_kinds
def test_consoles_of_one_workspace_share_nothing(kind: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        async with open_console(sandbox, TABLE) as first, open_console(sandbox, TABLE) as second:
            await said(first, "rows.clear()", "open('data/a.csv', 'w').write('')", "del first")
            texts = await said(second, "len(rows), open('data/a.csv').read()", "first()")
        assert texts == ["(100, 'a,b\\n1,2\\n')\n", "[0, 'name 0']\n"]

    within(kind, body)


def test_a_workspace_is_made_once_and_not_before_a_console_wants_it() -> None:
    setup = Workspace(lines=("import time", "made = time.time_ns()"))

    async def body(sandbox: Sandbox) -> None:
        async with open_console(sandbox, setup) as first, open_console(sandbox, setup) as second:
            assert await said(first, "made") == await said(second, "made")
        async with open_console(sandbox, setup) as third:
            assert (await said(third, "time.time_ns() > made"))[0] == "True\n"

    within("local", body)


def test_a_line_that_is_refused_is_not_tried_again_for_each_rollout_of_a_group() -> None:
    class Counted:
        render_if_changed = 0

    async def prepare(setup: object) -> object:
        Counted.render_if_changed += 1
        raise SetupError("workspace", "x", "correct it")

    async def main() -> None:
        stations = WorkspacePool(prepare, prepare, starting=4, shared=True)  # type: ignore[arg-type]
        for _ in range(3):
            with pytest.raises(SetupError):
                async with stations.lease(TABLE):
                    pass
        await stations.close()

    asyncio.run(main())
    assert Counted.render_if_changed == 1


class FakeStation:
    """A process that makes consoles of nothing."""

    def __init__(self, closed: list[str], digest: str) -> None:
        self.is_alive = True
        self._closed, self._digest = closed, digest

    def close(self) -> None:
        self._closed.append(self._digest)


class FakeConsole:
    def close(self) -> None: ...


def stations(closed: list[str], faults: Sequence[int] = ()) -> WorkspacePool:
    """Of which the births numbered in `faults` fail."""
    births = 0

    async def prepare(setup: Workspace) -> FakeStation:
        return FakeStation(closed, setup.digest)

    async def birth(station: FakeStation) -> FakeConsole:
        nonlocal births
        births += 1
        if births in faults:
            station.is_alive = False
            raise SandboxFault("it died")
        return FakeConsole()

    return WorkspacePool(prepare, birth, starting=4, shared=True)  # type: ignore[arg-type]


def test_unused_workspaces_are_ended_oldest_first_and_used_ones_stay() -> None:
    closed: list[str] = []
    setups = [Workspace(values={"n": n}) for n in range(IDLE + 3)]

    async def main() -> None:
        kept = stations(closed)
        async with kept.lease(setups[0]):
            for setup in setups[1:]:
                async with kept.lease(setup):
                    pass
            assert closed == [setups[1].digest, setups[2].digest]
            assert len(kept) == IDLE + 1
        await kept.close()

    asyncio.run(main())
    assert sorted(closed) == sorted(setup.digest for setup in setups)


def test_a_process_that_dies_is_replaced_and_its_workspace_made_again() -> None:
    closed: list[str] = []

    async def main() -> None:
        kept = stations(closed, faults=(1, 2))
        async with kept.lease(TABLE):
            assert closed == [TABLE.digest] * 2
        await kept.close()

    asyncio.run(main())
    assert closed == [TABLE.digest] * 3


def test_a_sandbox_that_prepares_nothing_is_refused_for_a_task_with_a_workspace() -> None:
    class Plain:
        name = "plain"

    assert not isinstance(Plain(), SupportsWorkspace)
    with pytest.raises(ConfigError, match="sandbox is 'plain'; its consoles cannot begin"):
        open_console(Plain(), TABLE)  # type: ignore[arg-type]


def test_files_are_refused_in_this_very_process() -> None:
    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(SetupError, match="has no folder for them"):
            async with open_console(sandbox, TABLE):
                pass

    within("inprocess", body)


def test_lines_that_seed_give_every_console_the_same_numbers_and_others_do_not() -> None:
    seeded = Workspace(lines=("import random", "random.seed(7)"))
    plain = Workspace(lines=("import random",))

    async def numbers(sandbox: Sandbox, setup: Workspace) -> set[str]:
        async with open_console(sandbox, setup) as first, open_console(sandbox, setup) as second:
            return {(await said(each, "random.random()"))[0] for each in (first, second)}

    async def body(sandbox: Sandbox) -> None:
        assert len(await numbers(sandbox, seeded)) == 1
        assert len(await numbers(sandbox, plain)) == 2

    within("local", body)


def test_a_function_of_the_workspace_shows_its_lines_in_a_traceback() -> None:
    async def body(sandbox: Sandbox) -> None:
        setup = Workspace(lines=("def half(n):", "    return 1 / n"))
        async with open_console(sandbox, setup) as session:
            result = await session.push("half(0)")
        assert result.status is LineStatus.EXCEPTION
        assert 'File "<workspace>", line 2, in half\n    return 1 / n\n' in result.text

    within("local", body)


@pytest.mark.heavy
def test_consoles_with_a_workspace_keep_every_promise_of_the_others() -> None:
    async def main() -> None:
        async with open_sandbox("local", limits=WORKSPACE_LIMITS, warm=0) as sandbox:
            rows = await check_workspaces(sandbox, isolates=True)
        assert [row for row in rows if not row.passed] == []
        assert len(rows) > 50

    asyncio.run(main())


@pytest.mark.parametrize("name", WORKSPACE_CHECKS)
def test_workspaces_are_apart_and_bounded_where_nothing_else_is(name: str) -> None:
    async def main() -> str:
        async with open_sandbox("unsafe", limits=WORKSPACE_LIMITS, warm=0) as sandbox:
            return await run_workspace_check(sandbox, name)

    assert asyncio.run(main()) == ""


ORPHAN = Workspace(
    lines=(
        "import os",
        "",
        "if os.fork() == 0:",
        "    os.setsid()",
        "    if os.fork() == 0:",
        "        os.closerange(3, 64)",
        "        os.execlp('sleep', 'sleep', '98765')",
        "    os._exit(0)",
        "os.wait()",
    )
)


def test_a_process_that_a_workspace_hides_from_its_parent_ends_before_the_first_console() -> None:
    def left() -> list[str]:
        commands = [command(int(name)) for name in os.listdir("/proc") if name.isdecimal()]
        return [one for one in commands if one.startswith("sleep\x0098765")]

    async def body(sandbox: Sandbox) -> None:
        async with open_console(sandbox, ORPHAN) as session:
            assert await said(session, "1 + 1") == ["2\n"]
            wait_for(lambda: not left(), None)

    within("local", body)

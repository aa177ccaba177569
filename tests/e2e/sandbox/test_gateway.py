"""Consoles on real Jupyter servers: what they promise, and that nothing of them is left when either side goes."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from queue import Empty

import psutil
import pytest

from repl_rl.errors import ConfigError, SandboxFault, SandboxLost, SandboxUnavailable, SetupError
from repl_rl.sandbox import Limits, SandboxSession, open_sandbox
from repl_rl.sandbox.conformance import (
    SandboxCheckResult,
    check_fidelity,
    load_doctest_transcripts,
    load_edge_transcripts,
    run_suite,
)
from repl_rl.sandbox.conformance.limits_and_workspaces import FixtureWorkspace
from repl_rl.sandbox.jupyter_gateway.gateway_address import TOKEN, URL, GatewayAddress
from repl_rl.sandbox.jupyter_gateway.gateway_console import GatewayKernels, KernelWebSocket
from repl_rl.trajectory.trajectory import LineStatus
from tests.support.processes import wait_for
from tests.support.sandbox.jupyter_servers import KERNEL_GATEWAY, OURS, SEALED, SERVER, STOCK, Server, free_port, server

ROOT = Path(__file__).parents[3]
LIMITS = replace(Limits(), line_timeout_s=1.0, interrupt_grace_s=0.3, output_bytes=1024)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Jupyter server, which the environment names with its stock kernel."""
    with server(tmp_path_factory.mktemp("server")) as running, running.named():
        yield running


@asynccontextmanager
async def console() -> AsyncIterator[SandboxSession]:
    async with open_sandbox("gateway", limits=LIMITS, warm=0) as sandbox, sandbox.session() as session:
        yield session


def test_a_console_on_a_jupyter_server_speaks_like_any_other(here: Server) -> None:
    lines = ["x = 6", "x * 7", "for i in range(2):", "    i", "", "1/0", "input()", "print('\U0001f600')"]

    async def work() -> None:
        async with console() as session:
            results = [await session.push(line) for line in lines]
            assert [result.text for result in results[:5]] == ["", "42\n", "", "", "0\n1\n"]
            assert [result.incomplete for result in results] == [False, False, True, True, *[False] * 4]
            assert results[5].text.startswith('Traceback (most recent call last):\n  File "<stdin>", line 1')
            assert results[6].text.endswith("EOFError: EOF when reading a line\n")
            assert results[7].text == "\U0001f600\n"
            late = await session.push("import time; time.sleep(60)")
            assert late.status is LineStatus.TIMEOUT
            assert late.elapsed_s < 30
            last = await session.push("submit_final_answer(x)")
            assert (last.status, last.answer, session.ended) == (LineStatus.ANSWERED, "6", True)

    asyncio.run(work())
    assert here.kernels() == []


@pytest.mark.heavy
@pytest.mark.alone
def test_a_line_that_ends_its_kernel_is_killed_and_the_next_console_is_a_fresh_one(here: Server) -> None:
    async def work() -> None:
        async with open_sandbox("gateway", limits=LIMITS, warm=0) as sandbox:
            async with sandbox.session() as session:
                await session.push("import psutil")
                above = "[p.kill() for p in psutil.Process().parents() if 'ipykernel' in str(p.cmdline())]"
                assert (await session.push(above)).status is LineStatus.KILLED
            async with sandbox.session() as session:
                assert (await session.push("'psutil' in globals()")).text == "False\n"

    asyncio.run(work())


def test_what_is_wrong_with_a_server_is_told_before_anything_starts(
    here: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def problem(variable: str, value: str) -> str:
        async def work() -> None:
            async with open_sandbox("gateway"):
                pass

        with monkeypatch.context() as changed:
            changed.setenv(variable, value)
            with pytest.raises(SandboxUnavailable) as raised:
                asyncio.run(work())
        return str(raised.value)

    refused = problem(TOKEN, "wrong")
    assert "does not take the token (status 403); put it into JUPYTER_GATEWAY_AUTH_TOKEN" in refused
    assert "has no kernel 'julia'; name one of ours, python3, sealed behind the #" in problem(URL, f"{here.url}#julia")
    nobody = f"http://127.0.0.1:{free_port()}"
    assert f"{nobody} cannot be reached" in problem(URL, nobody)
    assert "is not a Jupyter server (status 404" in problem(URL, f"{here.url}/elsewhere")
    assert here.kernels() == []


@pytest.mark.heavy
@pytest.mark.alone
def test_a_workspace_is_made_on_the_server_and_a_bad_one_is_refused_with_its_line(here: Server) -> None:
    given = FixtureWorkspace({"rows": [1, 2]}, {"data/a.txt": b"hello"}, "import math", "half = lambda n: n / 2")

    async def work() -> None:
        async with open_sandbox("gateway", limits=LIMITS, warm=0) as sandbox:
            async with sandbox.open_workspace_session(given) as session:  # type: ignore[attr-defined]
                seen = await session.push("half(sum(rows)), open('data/a.txt').read(), math.pi > 3")
                assert seen.text == "(1.5, 'hello', True)\n"
            with pytest.raises(SetupError, match=r"line 2.*it raises ZeroDivisionError"):
                async with sandbox.open_workspace_session(FixtureWorkspace(None, None, "x = 1", "1 / 0")):  # type: ignore[attr-defined]
                    pass

    asyncio.run(work())


_HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"


@pytest.mark.parametrize(("sent", "status", "error"), [
    (b"hello world\r\n\r\n", 0, "no HTTP: BadStatusLine"),
    (_HEAD + b"Transfer-Encoding: chunked\r\n\r\n64\r\n{}", 0, "no HTTP: IncompleteRead"),
    (b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n64\r\n{}", 0, "no HTTP: IncompleteRead"),
    (_HEAD + b"Content-Length: 100\r\n\r\n{", 200, "no JSON"),
    (_HEAD + b"\r\n" + b"[" * 100_000, 200, "no JSON"),
    (_HEAD + b"\r\n[" + b"1e15," * 1_000_000 + b"1]", 200, "longer than 4000000 bytes"),
    (_HEAD + b"\r\n[" + b"1e15," * 790_000 + b"1]", 200, ""),
], ids=["no HTTP", "short", "short error", "cut", "deep", "long", "longest"])  # fmt: skip
def test_a_strange_answer_of_a_server_is_an_answer(sent: bytes, status: int, error: str) -> None:
    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def serve() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65_536)
                    connection.sendall(sent)

            serving = threading.Thread(target=serve)
            serving.start()
            kernels = await GatewayKernels.connect(
                GatewayAddress(f"http://127.0.0.1:{listener.getsockname()[1]}", "", "")
            )
            async with asyncio.timeout(30):
                answer = await kernels.list_specs()
            await kernels.close()
            await asyncio.to_thread(serving.join)
        assert (answer.status, error in answer.error) == (status, True), answer.error

    asyncio.run(work())


def test_requests_fail_if_the_answers_of_the_process_cannot_be_read() -> None:
    begun = "import sys; sys.stdin.readline(); sys.stdin.readline()"
    bad = ("'x' * (17 << 20)", "'[' * 1_000_000", "'no'")
    programs = [f"{begun}; print({line}, flush=True); sys.stdin.read()" for line in bad]

    async def work(program: str) -> None:
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdin=pipe, stdout=pipe, stderr=null
        )
        kernels = GatewayKernels(process)
        asked = asyncio.gather(kernels.list_specs(), kernels.start_kernel(""), return_exceptions=True)
        async with asyncio.timeout(30):
            assert [type(answer) for answer in await asked] == [SandboxLost] * 2
        await kernels.close()

    for program in programs:
        asyncio.run(work(program))


class _Channel:
    """Channel of a kernel that has sent these messages."""

    def __init__(self, *messages: object) -> None:
        self._messages = list(messages)

    def get_msg(self, timeout: float) -> object:
        if not self._messages:
            raise Empty
        return self._messages.pop(0)

    def get_msgs(self) -> list[object]:
        sent, self._messages = self._messages, []
        return sent


class _Client:
    """Client of a kernel that answers with these messages."""

    def __init__(self, channel: str, message: object) -> None:
        self.connection_ready = threading.Event()
        self.connection_ready.set()
        self.shell_channel = self.stdin_channel = self.iopub_channel = _Channel()
        setattr(self, channel, _Channel(message))

    def execute(self, *_: object, **__: object) -> str:
        return "asked"

    def input(self, _: str) -> None:
        raise AssertionError("the question was answered")


@pytest.mark.parametrize(("channel", "message"), [
    ("shell_channel", {"parent_header": None, "content": {}}),
    ("shell_channel", {"content": {}}),
    ("shell_channel", {"content": []}),
    ("shell_channel", {"content": None}),
    ("shell_channel", {}),
    ("shell_channel", {"content": {"status": "ok"}}),
    ("shell_channel", {"content": {"status": "ok", "user_expressions": []}}),
    ("shell_channel", {"content": {"status": "ok", "user_expressions": {"said": "x"}}}),
    ("shell_channel", {"content": {"status": "ok", "user_expressions": {"said": {"status": "ok", "data": None}}}}),
    ("iopub_channel", {"content": None}),
    ("iopub_channel", {}),
    ("stdin_channel", {"content": {}}),
    ("stdin_channel", {"content": {"prompt": None}}),
    ("stdin_channel", {"content": None}),
    ("stdin_channel", {"parent_header": [], "content": {"prompt": ""}}),
])  # fmt: skip
def test_a_kernel_that_sends_wrong_fields_is_a_fault_of_its_console(channel: str, message: dict[str, object]) -> None:
    link = KernelWebSocket(GatewayAddress("http://127.0.0.1:1", "", ""), "1")
    link._client = _Client(channel, {"parent_header": {"msg_id": "asked"}, **message})
    with pytest.raises(SandboxFault) as raised:
        link.run_and_read("", "", 30.0, str)
    assert raised.type is SandboxFault


_FLOOD = """
import os, signal, socket, stat
signal.signal(signal.SIGINT, signal.SIG_IGN)
def unix(fd):
    try: return stat.S_ISSOCK(os.fstat(fd).st_mode) and socket.socket(fileno=os.dup(fd))
    except OSError: return None

found = [one for one in map(unix, range(64)) if one and one.family == socket.AF_UNIX]
found = [one for one in found if one.type == socket.SOCK_STREAM]
found = [one for one in found if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]
found[0].setblocking(True)
while True: found[0].sendall(bytes([0, 1, 120]) * 20_000)
"""


@pytest.mark.heavy
@pytest.mark.alone
def test_a_console_that_floods_its_relay_is_killed_at_the_deadline(here: Server) -> None:
    async def work() -> None:
        # Without the deadline, the flood would last as long as its CPU time.
        limits = replace(LIMITS, cpu_s=120)
        async with open_sandbox("gateway", limits=limits, warm=0) as sandbox, sandbox.session() as session:
            late = await session.push(f"exec({_FLOOD!r})")
            assert (late.status, late.elapsed_s < 20) == (LineStatus.TIMEOUT, True), late

    asyncio.run(work())


def test_an_address_is_said_by_the_environment_and_never_with_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "s3cret")
    monkeypatch.setenv(URL, "https://host/user/me/#python3")
    assert GatewayAddress.from_environment() == GatewayAddress("https://host/user/me", "python3", "s3cret")
    for url in ("http://host:8888/?token=s3cret", "http://me:s3cret@host:8888"):
        monkeypatch.setenv(URL, url)
        with pytest.raises(ConfigError, match="put the token into JUPYTER_GATEWAY_AUTH_TOKEN") as raised:
            open_sandbox("gateway")
        assert "s3cret" not in str(raised.value)
    for url in ("", "host:8888"):
        monkeypatch.setenv(URL, url)
        with pytest.raises(ConfigError, match=r"JUPYTER_GATEWAY_URL is .*set it to the address of a Jupyter server"):
            open_sandbox("gateway")


_HOST = """
import asyncio
from repl_rl.sandbox import open_sandbox

async def main():
    async with open_sandbox("gateway", warm=2) as sandbox:
        async with sandbox.session() as first, sandbox.session() as second:
            await first.push("import subprocess; p = subprocess.Popen(['sleep', '4242'])")
            await asyncio.gather(second.push("while True: pass"), first.push("1"))
            running = asyncio.create_task(second.push(""))
            for _ in range(1000):
                await asyncio.sleep(0)  # the line is on its way, and runs
            print("up", flush=True)
            await running

asyncio.run(main())
"""


@pytest.mark.heavy
@pytest.mark.alone
@pytest.mark.parametrize("kernel", [STOCK, SEALED])
def test_a_host_that_is_killed_leaves_no_kernel_no_process_and_no_file(here: Server, kernel: str) -> None:
    alone = {child.pid for child in psutil.Process(here.process.pid).children(recursive=True)}
    env = {**os.environ, **here.variables(kernel)}
    host = subprocess.Popen([sys.executable, "-c", _HOST], stdout=subprocess.PIPE, cwd=ROOT, env=env, text=True)
    assert host.stdout is not None
    with host, host.stdout:
        assert host.stdout.readline() == "up\n"
        family = psutil.Process(host.pid).children(recursive=True)
        assert len(here.kernels()) >= 2
        host.kill()
    wait_for(lambda: not here.kernels(), None, 60)
    assert psutil.wait_procs(family, timeout=20)[1] == []
    below = psutil.Process(here.process.pid)
    wait_for(lambda: {child.pid for child in below.children(recursive=True)} <= alone, None, 20)
    wait_for(lambda: not list(here.scratch.glob("repl-rl-*")), None, 20)


@pytest.mark.heavy
@pytest.mark.alone
def test_a_server_that_is_restarted_loses_its_consoles_and_gives_new_ones(tmp_path: Path) -> None:
    port, token = free_port(), "of-both"

    async def work() -> None:
        with server(tmp_path, port=port, token=token) as first:
            with first.named():
                opened = open_sandbox("gateway", warm=0)
            sandbox = await opened.__aenter__()
            leased = [sandbox.session(), sandbox.session()]
            busy, idle = [await lease.__aenter__() for lease in leased]
            assert (await idle.push("x = 1")).status is LineStatus.OK
            line = asyncio.create_task(busy.push("import time; time.sleep(4)"))
            await asyncio.to_thread(wait_for, lambda: _running(first), None, 60)
            first.process.kill()
            with pytest.raises(SandboxLost, match="connection to the Jupyter server is gone"):
                await line
            with pytest.raises(SandboxLost):
                await idle.push("x")
        with server(tmp_path, port=port, token=token):
            for lease in leased:
                await lease.__aexit__(None, None, None)
            async with sandbox.session() as fresh:
                assert (await fresh.push("6 * 7")).text == "42\n"
            await opened.__aexit__(None, None, None)

    asyncio.run(work())


def _running(running: Server) -> bool:
    return any(kernel["execution_state"] == "busy" for kernel in running.kernels())


def _wrong(rows: list[SandboxCheckResult]) -> list[SandboxCheckResult]:
    return [row for row in rows if not row.passed]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("program", "kernel"), [
    pytest.param(SERVER, STOCK, marks=[pytest.mark.heavy, pytest.mark.alone]),
    pytest.param(KERNEL_GATEWAY, OURS, marks=pytest.mark.soak),
    pytest.param(SERVER, SEALED, marks=pytest.mark.soak),
])  # fmt: skip
def test_every_promise_is_kept(program: str, kernel: str, tmp_path: Path) -> None:
    with server(tmp_path, program) as running, running.named(kernel):
        rows = asyncio.run(run_suite("gateway", doctests=2))
        assert _wrong(rows) == []
        assert {"limits", "host functions", "workspace", "workspace, limits"} <= {row.section for row in rows}
        assert running.kernels() == []


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("program", "kernel"), [
    (SERVER, STOCK), (KERNEL_GATEWAY, STOCK), (SERVER, OURS), (KERNEL_GATEWAY, SEALED),
])  # fmt: skip
def test_a_thousand_doctests_are_printed_byte_for_byte(program: str, kernel: str, tmp_path: Path) -> None:
    cases = load_doctest_transcripts()
    assert sum(case.example_count for case in cases) >= 1000

    async def work() -> list[SandboxCheckResult]:
        async with open_sandbox("gateway", starting=2) as sandbox:
            rows = await check_fidelity(sandbox, load_edge_transcripts(), "corner cases")
            return rows + await check_fidelity(sandbox, cases, "doctests")

    with server(tmp_path, program) as running, running.named(kernel):
        rows = asyncio.run(work())
    print(rows)
    assert _wrong(rows) == []

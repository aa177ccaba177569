"""Consoles on a real Ray cluster, whose machines are simulated on this one."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from repl_rl.errors import ConfigError, SandboxLost
from repl_rl.ray.config import Nodes
from repl_rl.ray.connect_cluster import connect_to_ray
from repl_rl.ray.console_actors import RayHostMachines
from repl_rl.ray.console_sandbox import HostedSandbox, HostSpec, HostTimeouts, open_hosted_sandbox
from repl_rl.ray.start_local_cluster import Machines, add_machine
from repl_rl.sandbox import Limits, SandboxOptions, SandboxSession, open_sandbox
from repl_rl.sandbox.conformance import SandboxCheckResult, run_suite
from tests.e2e.test_docs_commands import SMALL
from tests.support.processes import wait_for

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]
LIMITS = replace(Limits(), line_timeout_s=60)
WAITS = HostTimeouts(
    poll_interval_s=0.2, heartbeat_interval_s=0.5, heartbeat_timeout_s=10, restart_delays_s=(1.0,) * 120
)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """A cluster of two machines that this process is on; when it is gone, nothing of it is left."""
    before = set(psutil.Process().children(recursive=True))
    with connect_to_ray("test", "", 2) as here:
        assert here is not None
        yield here
    assert psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=60)[1] == []


def hosts() -> list[psutil.Process]:
    """Processes that hold consoles."""
    below = psutil.Process().children(recursive=True)
    return [process for process in below if "ConsoleHost" in _title(process)]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


async def _above(session: SandboxSession, holders: list[psutil.Process]) -> psutil.Process:
    """The process that holds a console: below it runs what the console starts."""
    mark = f"{os.getpid()}{id(session)}"
    await session.push(f"import subprocess; p = subprocess.Popen(['sleep', '{mark}'])")
    (found,) = [one for one in holders if any(mark in _title(child) for child in one.children(recursive=True))]
    return found


@pytest.mark.parametrize("harm", ["killed", "frozen"])
def test_an_actor_that_goes_loses_its_consoles_alone_and_leaves_nothing(machines: Machines, harm: str) -> None:
    async def work() -> None:
        wanted = HostSpec("local", SandboxOptions(LIMITS, (), 0, 2), 8, WAITS)
        async with open_hosted_sandbox(RayHostMachines(), wanted) as sandbox:
            async with sandbox.session() as first, sandbox.session() as second:
                victim, other = [await _above(session, hosts()) for session in (first, second)]
                assert victim != other, "consoles are spread over the machines"
                family = [victim, *victim.children(recursive=True)]
                line = asyncio.create_task(first.push("p.wait()"))
                await asyncio.to_thread(wait_for, lambda: not line.done(), None)
                victim.send_signal(signal.SIGKILL if harm == "killed" else signal.SIGSTOP)
                with pytest.raises(SandboxLost):
                    await line
                assert (await second.push("6 * 7")).text == "42\n"
            await asyncio.to_thread(psutil.wait_procs, family, 60)
            assert [process for process in family if process.is_running()] == []
            await asyncio.to_thread(wait_for, lambda: len(_held(sandbox)) == 2, None)
            async with sandbox.session() as third, sandbox.session() as fourth:
                assert [(await one.push("1")).text for one in (third, fourth)] == ["1\n", "1\n"]

    asyncio.run(work())
    wait_for(lambda: not hosts(), None, 60)


def _held(sandbox: HostedSandbox) -> dict[str, int]:
    """Consoles of each machine."""
    return {host.name: count for host, count in sandbox.leases_per_host.items()}


def test_a_machine_that_goes_loses_its_consoles_alone_and_one_that_comes_is_used(machines: Machines) -> None:
    third = add_machine(machines, "test", num_cpus=1)

    async def work() -> None:
        wanted = HostSpec("local", SandboxOptions(LIMITS, (), 0, 2), 8, WAITS)
        async with open_hosted_sandbox(RayHostMachines(), wanted) as sandbox:
            sessions = [sandbox.session() for _ in range(3)]
            leased = [await session.__aenter__() for session in sessions]
            assert sorted(_held(sandbox).values()) == [1, 1, 1]
            lines = [asyncio.create_task(one.push("import time; time.sleep(20)")) for one in leased]
            await asyncio.to_thread(machines.remove_node, third, False)
            ended = await asyncio.gather(*lines, return_exceptions=True)
            assert [isinstance(one, SandboxLost) for one in ended].count(True) == 1
            assert len(_held(sandbox)) == 2
            for session in sessions:
                await session.__aexit__(None, None, None)
            async with sandbox.session() as fresh:
                assert (await fresh.push("1")).text == "1\n"

    asyncio.run(work())


_OWNER = """
import asyncio
from repl_rl.sandbox import open_sandbox

async def main():
    async with open_sandbox("nodes", warm=2) as sandbox:
        async with sandbox.session() as first, sandbox.session() as second:
            await first.push("import subprocess; p = subprocess.Popen(['sleep', '4242'])")
            running = asyncio.create_task(second.push("while True: pass\\n".strip()))
            await first.push("1")
            print("up", flush=True)
            await asyncio.Event().wait()

asyncio.run(main())
"""


def _folders() -> set[Path]:
    """Of clusters that were started here."""
    return set(Path(tempfile.gettempdir()).glob("repl_rl-ray-*"))


_CONSOLE = """
import asyncio
from repl_rl.sandbox import open_sandbox

async def main():
    async with open_sandbox("nodes", warm=1) as sandbox, sandbox.session() as session:
        print((await session.push("6 * 7")).text)

asyncio.run(main())
"""


def test_a_cluster_starts_where_addresses_in_the_temporary_folder_would_be_too_long(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", _CONSOLE], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "42", done.stderr


def test_an_owner_that_is_killed_leaves_no_process_and_no_file() -> None:
    before = _folders()
    with subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, cwd=ROOT, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        family = psutil.Process(owner.pid).children(recursive=True)
        assert any("ConsoleHost" in _title(process) for process in family)
        assert any("4242" in _title(process) for process in family)
        folders = _folders() - before
        owner.kill()
    assert psutil.wait_procs(family, timeout=60)[1] == []
    wait_for(lambda: not any(folder.exists() for folder in folders), None, 60)


def test_an_owner_that_is_killed_leaves_no_actor_on_a_cluster_that_lives_on(machines: Machines) -> None:
    env = {**os.environ, "RAY_ADDRESS": machines.address}
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, cwd=ROOT, env=env, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        family = [member for host in hosts() for member in (host, *host.children(recursive=True))]
        assert any("4242" in _title(process) for process in family)
        owner.kill()
    assert psutil.wait_procs(family, timeout=60)[1] == []


def test_a_process_on_a_cluster_uses_it_and_refuses_the_address_of_another(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(address: str) -> str:
        monkeypatch.setenv("RAY_ADDRESS", address)
        async with open_sandbox("nodes", warm=0) as sandbox, sandbox.session() as session:
            return (await session.push("6 * 7")).text

    assert asyncio.run(work("")) == asyncio.run(work(machines.address)) == "42\n"
    with pytest.raises(ConfigError, match=r"this process is on the cluster .*; give that address, or none"):
        asyncio.run(work("127.0.0.1:1"))


@pytest.mark.timeout(1200)
def test_every_promise_is_kept(machines: Machines) -> None:
    rows: list[SandboxCheckResult] = asyncio.run(run_suite(Nodes(), doctests=4))
    assert [row for row in rows if not row.passed] == []
    assert {"isolation", "limits", "host functions", "workspace", "workspace, limits"} <= {row.section for row in rows}


def test_the_command_of_the_page_trains_with_nodes_of_a_fleet_whose_consoles_are_elsewhere(tmp_path: Path) -> None:
    command = "train --name wide --workers ray --workers.max-workers 1 --workers.simulate-machines true --sandbox nodes"
    argv = [sys.executable, "-m", "repl_rl.cli", *command.split(), *SMALL["train"].split()]
    subprocess.run(argv, cwd=tmp_path, check=True, timeout=500)
    summary = json.loads((tmp_path / "runs" / "wide" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["sandbox"]) == ("finished", 1, "nodes")

"""Consoles on machines of a cluster: which machine gives them, what is lost with one, and what is refused."""

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from repl_rl.cli.train import TrainConfig
from repl_rl.errors import ConfigError, SandboxFault, SandboxLost, SandboxUnavailable, SetupError
from repl_rl.ray.config import Nodes, read_cluster_address
from repl_rl.ray.console_actors import CONSOLES
from repl_rl.ray.console_sandbox import (
    HostedSandbox,
    HostedSession,
    HostSpec,
    HostTimeouts,
    LeaseQueue,
    open_hosted_sandbox,
)
from repl_rl.sandbox import Limits, SandboxOptions, open_sandbox
from repl_rl.sandbox.conformance import HOST_CHECKS, run_host_check
from repl_rl.sandbox.conformance.limits_and_workspaces import (
    KEPT,
    WORKSPACE_CHECKS,
    FixtureWorkspace,
    run_workspace_check,
)
from repl_rl.settings.argument_parser import parse
from repl_rl.trajectory.trajectory import LineStatus
from tests.support.documents import PAGES
from tests.support.processes import wait_for
from tests.support.sandbox.memory_hosts import MemoryHost, MemoryMachines

WAITS = HostTimeouts(
    poll_interval_s=0.02,
    heartbeat_interval_s=0.02,
    heartbeat_timeout_s=5,
    restart_delays_s=(0.02, 0.02),
    end_timeout_s=20,
)
LIMITS = replace(Limits(), line_timeout_s=1.0, interrupt_grace_s=0.3)


@asynccontextmanager
async def consoles(
    machines: MemoryMachines, most: int = 8, limits: Limits = LIMITS, waits: HostTimeouts = WAITS
) -> AsyncIterator[HostedSandbox]:
    births = SandboxOptions(limits, (), 0, 2)
    async with open_hosted_sandbox(machines, HostSpec("unsafe", births, most, waits)) as sandbox:
        yield sandbox
    await machines.settle()


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop turn until something is so."""
    await asyncio.to_thread(wait_for, condition, None, 60)


# which machine is next


async def _taken(leases: LeaseQueue[str], count: int) -> list[str]:
    return [await leases.acquire() for _ in range(count)]


def test_places_are_spread_evenly_and_no_machine_holds_more_than_it_may() -> None:
    async def work() -> None:
        leases = LeaseQueue[str](2)
        for name in "abc":
            leases.add_host(name)
        assert await _taken(leases, 6) == ["a", "b", "c", "a", "b", "c"]
        seventh = asyncio.create_task(leases.acquire())
        await asyncio.sleep(0)
        assert not seventh.done()
        leases.release("b")
        assert await seventh == "b"
        assert leases.leases_per_host == {"a": 2, "b": 2, "c": 2}

    asyncio.run(work())


def test_a_machine_that_comes_takes_those_who_wait_in_the_order_in_which_they_came() -> None:
    async def work() -> None:
        leases, served = LeaseQueue[str](3), list[int]()

        async def wait(number: int) -> None:
            await leases.acquire()
            served.append(number)

        tasks = [asyncio.create_task(wait(number)) for number in range(5)]
        await asyncio.sleep(0)
        assert leases.waiting_count == 5
        leases.add_host("a")
        await until(lambda: len(served) == 3)
        leases.release("a")
        leases.release("a")
        await asyncio.gather(*tasks)
        assert served == [0, 1, 2, 3, 4]

    asyncio.run(work())


def test_who_stops_waiting_takes_no_place_even_when_it_was_his_already() -> None:
    async def work() -> None:
        leases = LeaseQueue[str](1)
        leases.add_host("a")
        await leases.acquire()
        first, second = asyncio.create_task(leases.acquire()), asyncio.create_task(leases.acquire())
        await asyncio.sleep(0)
        leases.release("a")  # the place is the first one's, who does not know it yet
        first.cancel()
        assert await second == "a"
        assert first.cancelled()
        assert leases.leases_per_host == {"a": 1}

    asyncio.run(work())


def test_places_of_a_machine_that_is_gone_are_gone_and_whoever_is_refused_may_come_again() -> None:
    async def work() -> None:
        leases = LeaseQueue[str](1)
        leases.add_host("a")
        await leases.acquire()
        leases.remove_host("a")
        leases.release("a")
        waiting = asyncio.create_task(leases.acquire())
        await asyncio.sleep(0)
        leases.fail_waiting(lambda: SandboxLost("none"))
        with pytest.raises(SandboxLost):
            await waiting
        leases.add_host("b")
        assert await leases.acquire() == "b"

    asyncio.run(work())


# what a console promises, on machines that are this process


@pytest.mark.parametrize("check", HOST_CHECKS, ids=lambda check: check.name)
def test_lines_call_functions_of_the_host(check: object) -> None:
    async def work() -> str:
        async with consoles(MemoryMachines("a"), limits=replace(Limits(), line_timeout_s=20)) as sandbox:
            return await run_host_check(sandbox, next(one for one in HOST_CHECKS if one is check))

    assert asyncio.run(work()) == ""


@pytest.mark.parametrize("name", list(WORKSPACE_CHECKS)[:3])
def test_consoles_begin_with_a_workspace(name: str) -> None:
    async def work() -> str:
        async with consoles(MemoryMachines("a", "b")) as sandbox:
            return await run_workspace_check(sandbox, name)

    assert asyncio.run(work()) == ""


def test_a_bad_workspace_is_refused_with_its_line_and_takes_no_place() -> None:
    async def work() -> None:
        async with consoles(MemoryMachines("a"), most=1) as sandbox:
            for _ in range(2):
                with pytest.raises(SetupError, match=r"line 2.*ZeroDivisionError"):
                    async with sandbox.open_workspace_session(FixtureWorkspace(None, None, "x = 1", "1 / 0")):
                        pass
            async with sandbox.open_workspace_session(KEPT) as session:
                assert (await session.push("rows")).text == "[1, 2, 3]\n"

    asyncio.run(work())


def test_a_line_that_takes_too_long_is_interrupted_where_it_runs_and_the_console_goes_on() -> None:
    async def work() -> None:
        machines = MemoryMachines("a")
        async with consoles(machines) as sandbox, sandbox.session() as session:
            late = await session.push("import time; time.sleep(60)")
            assert late.status is LineStatus.TIMEOUT
            assert (await session.push("6 * 7")).text == "42\n"
            assert machines.hosts[0].pushes == 2, "one call a line"
            last = await session.push("submit_final_answer(1)")
            assert (last.answer, session.ended) == ("1", True)
            with pytest.raises(ConfigError, match="take a fresh session"):
                await session.push("1")

    asyncio.run(work())


class Failing:
    """A host function of ours that breaks."""

    functions = {"ask": "ask()"}  # noqa: RUF012
    argument_bytes = 100

    async def answer_call(self, call: bytes) -> bytes:
        raise SandboxFault(f"ours broke on {call[:8]!r}")


def test_an_error_of_ours_in_a_host_function_ends_the_line_and_rises() -> None:
    async def work() -> None:
        async with consoles(MemoryMachines("a")) as sandbox, sandbox.session() as session:
            session.offer_functions(Failing())
            with pytest.raises(SandboxFault, match="ours broke"):
                await session.push("ask()")
            assert session.ended
            with pytest.raises(ConfigError, match="offer host functions before the first line"):
                session.offer_functions(Failing())

    asyncio.run(work())


class Asked:
    """Host functions that never answer, and say when they were asked, and when that was over."""

    functions = {"ask": "ask()"}  # noqa: RUF012
    argument_bytes = 100

    def __init__(self) -> None:
        self.begun, self.over = asyncio.Event(), asyncio.Event()

    async def answer_call(self, call: bytes) -> bytes:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.over.set()
        return call


def test_a_rollout_that_is_cancelled_frees_its_place_and_what_it_asked_the_host_for() -> None:
    async def work() -> None:
        async with consoles(MemoryMachines("a"), most=1) as sandbox:
            asked = Asked()

            async def rollout() -> None:
                async with sandbox.session() as session:
                    session.offer_functions(asked)
                    await session.push("ask()")

            running = asyncio.create_task(rollout())
            await asked.begun.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert asked.over.is_set()
            async with sandbox.session() as session:
                assert (await session.push("1 + 1")).text == "2\n"

    asyncio.run(work())


# what dies


async def _both(
    sandbox: HostedSandbox, harm: Callable[[MemoryMachines, MemoryHost], None], machines: MemoryMachines
) -> str:
    """A line runs on one machine and a console lives on another while the first comes to harm; its name."""
    async with sandbox.session() as first, sandbox.session() as second:
        await second.push("x = 5")
        (victim,) = [host for host in machines.hosts if not host.pushes]
        line = asyncio.create_task(first.push("import time; time.sleep(9)"))
        await until(lambda: victim.pushes)
        harm(machines, victim)
        with pytest.raises(SandboxLost):
            await line
        assert (await second.push("x")).text == "5\n"
        async with sandbox.session() as other:
            assert (await other.push("2")).text == "2\n"
    return victim.name


def test_a_host_that_dies_loses_its_consoles_alone_and_another_takes_its_place() -> None:
    async def work() -> None:
        machines = MemoryMachines("a", "b")
        async with consoles(machines, limits=Limits(line_timeout_s=30)) as sandbox:
            lost = await _both(sandbox, lambda _, victim: victim.kill(), machines)
            await until(lambda: [host.name for host in machines.hosts] == ["a", "b", lost])

    asyncio.run(work())


def test_a_machine_that_goes_loses_its_consoles_alone_and_one_that_comes_is_used() -> None:
    def exchange(machines: MemoryMachines, victim: MemoryHost) -> None:
        machines.lose(victim.name)
        machines.living.append("c")

    async def work() -> None:
        machines = MemoryMachines("a", "b")
        async with consoles(machines, most=1, limits=Limits(line_timeout_s=30)) as sandbox:
            await _both(sandbox, exchange, machines)
            assert [host.name for host in machines.hosts] == ["a", "b", "c"]

    asyncio.run(work())


def test_a_host_that_is_frozen_is_given_up() -> None:
    def freeze(machines: MemoryMachines, victim: MemoryHost) -> None:
        victim.frozen = True

    async def work() -> None:
        machines = MemoryMachines("a", "b")
        waits = replace(WAITS, heartbeat_timeout_s=0.5)
        async with consoles(machines, limits=Limits(line_timeout_s=30), waits=waits) as sandbox:
            await _both(sandbox, freeze, machines)

    asyncio.run(work())


def test_a_lease_that_meets_a_dead_host_is_had_elsewhere() -> None:
    async def work() -> None:
        machines = MemoryMachines("a", "b")
        async with consoles(machines, waits=replace(WAITS, heartbeat_interval_s=1000)) as sandbox:
            machines.hosts[0].kill()
            async with sandbox.session() as session:
                assert (await session.push("1")).text == "1\n"

    asyncio.run(work())


def test_where_every_machine_is_gone_whoever_waits_is_told_and_a_new_machine_serves_again() -> None:
    async def work() -> None:
        machines = MemoryMachines("a")
        async with consoles(machines) as sandbox:
            machines.lose("a")
            with pytest.raises(SandboxLost, match="no machine holds consoles: on a: it was killed"):
                async with sandbox.session():
                    pass
            machines.living.append("b")
            async with AsyncExitStack() as stack:
                session = await _patient(lambda: stack.enter_async_context(sandbox.session()))
                assert (await session.push("3")).text == "3\n"

    asyncio.run(work())


async def _patient(lease: Callable[[], Awaitable[HostedSession]]) -> HostedSession:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(SandboxLost):
                return await lease()


# what is refused


def test_a_machine_without_isolation_is_not_used_and_where_all_are_so_it_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        machines = MemoryMachines("a", "b")
        machines.bad = {"a"}
        async with consoles(machines) as sandbox, sandbox.session() as session:
            assert (await session.push("1")).text == "1\n"
        assert "machine a holds no consoles (sandbox 'local' needs the program bwrap" in caplog.text
        machines.bad = {"a", "b"}
        with pytest.raises(SandboxUnavailable, match=r"no machine holds consoles: on .: .*install bubblewrap"):
            async with consoles(machines):
                pass
        with pytest.raises(SandboxUnavailable, match="no machine of the cluster has CPUs; add some"):
            async with consoles(MemoryMachines()):
                pass

    asyncio.run(work())


def test_warm_consoles_are_spread_over_the_machines() -> None:
    wanted = HostSpec("local", SandboxOptions(pool_size=20), 8)
    assert [wanted.divide_options(machines).pool_size for machines in (1, 3, 20, 40)] == [8, 7, 1, 1]


@pytest.mark.parametrize("address", ["head", "head:x", ":6379"])
def test_an_address_that_is_none_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS is '{address}'; give HOST:PORT"):
        open_sandbox("nodes")


def test_its_cluster_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert read_cluster_address() == ""
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert read_cluster_address() == "head:6379"
    assert parse(TrainConfig, "train", ("--sandbox", "nodes")).sandbox == Nodes()


def test_without_ray_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("repl_rl.ray.config.find_spec", lambda name: None if name == "ray" else find(name))
    with pytest.raises(SandboxUnavailable, match=r"Ray is not installed; pip install 'repl_rl\[ray\]'"):
        open_sandbox("nodes")
    with pytest.raises(SandboxUnavailable, match="Ray is not installed"):
        asyncio.run(Nodes().describe_status())


def test_the_page_says_how_many_consoles_a_machine_holds() -> None:
    assert f"Each holds {CONSOLES} at a time" in PAGES["docs/scaling.md"]

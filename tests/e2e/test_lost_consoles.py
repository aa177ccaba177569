"""Consoles that die with what made them: rollouts on them are dropped, counted, and played again in their places."""

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import psutil
import pytest

from repl_rl.errors import SandboxFault, SandboxLost, SandboxUnavailable, UnrecoverableError
from repl_rl.rollout import ReplSampler, Rollouts
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.retry import MAX_ATTEMPTS, get_fault_counts
from repl_rl.rollout.rollout_stats import compute_step_metrics
from repl_rl.sandbox import InProcessSandbox, LineResult, SandboxSession, open_sandbox
from repl_rl.sandbox.base import Limits
from repl_rl.sandbox.console_pool import SharedForkServer
from repl_rl.sandbox.fork_server_client import ForkServer, ProcessLauncher, RunningProcess
from repl_rl.sandbox.inprocess import InProcessSession
from repl_rl.sandbox.isolated_subprocess import make_local_launcher
from repl_rl.tasks import Workspace
from repl_rl.trajectory.trajectory import FailureKind, Stop, Trajectory
from repl_rl.utils.package_data import find_asset
from tests.support.scripted_rollouts import TASK, world

LINES = ["x = 6\n", "x * 7\n", "submit_final_answer(x * 7)\n"]


class Frail(InProcessSession):
    """A console that is lost with its second line."""

    lines = 0

    async def push(self, line: str) -> LineResult:
        self.lines += 1
        if self.lines == 2:
            raise SandboxLost("the fork server of the console is gone")
        return await super().push(line)


class FrailSandbox(InProcessSandbox):
    """Its first consoles are lost."""

    def __init__(self, frail: int) -> None:
        super().__init__()
        self.frail = frail

    @asynccontextmanager
    async def session(self) -> AsyncIterator[InProcessSession]:
        self.frail -= 1
        async with super().session() as session:
            yield Frail(Limits()) if self.frail >= 0 else session


def play(frail: int, rollouts: int = 6, sampler: ReplSampler | None = None) -> tuple[list[Trajectory], Rollouts]:
    played = replace(world(LINES, sampler, concurrency=3), sandbox=FrailSandbox(frail))
    return asyncio.run(played.collect([TASK] * rollouts)), played


def lines(trajectories: Sequence[Trajectory]) -> list[object]:
    return [(t.id, t.seed, t.outcome, t.stop, t.completion_ids) for t in trajectories]


def test_a_group_is_full_again_after_consoles_were_lost() -> None:
    whole, undisturbed = play(0)
    found, rollouts = play(2)
    assert lines(found) == lines(whole)
    assert [t.outcome for t in found] == [1.0] * 6
    counts = {"engine_deaths": 0, "consoles_lost": 2, "rollouts_replayed": 2, "rollouts_given_up": 0}
    told = [
        compute_step_metrics(each.sampler, each.limits, found, None, get_fault_counts(each))
        for each in (rollouts, undisturbed)
    ]
    assert told == [counts, {}]


def test_a_rollout_that_loses_its_console_again_and_again_is_dropped_and_counted() -> None:
    class First(FrailSandbox):
        """Whoever comes first is unlucky each time."""

        @asynccontextmanager
        async def session(self) -> AsyncIterator[InProcessSession]:
            async with InProcessSandbox().session() as session:
                yield Frail(Limits()) if unlucky.pop(asyncio.current_task(), False) else session

    unlucky: dict[asyncio.Task[object] | None, bool] = {}

    class Marked(ReplSampler):
        async def rollout(self, episode: Episode) -> None:
            unlucky[asyncio.current_task()] = episode.id.endswith("-0")
            await super().rollout(episode)

    rollouts = replace(world(LINES, Marked(), concurrency=3), sandbox=First(0))
    found = asyncio.run(rollouts.collect([TASK] * 4))
    assert [t.stop for t in found] == [Stop.FAULT, *[Stop.ANSWERED] * 3]
    assert found[0].failure is not None
    assert found[0].failure.kind is FailureKind.SANDBOX_FAULT
    assert found[0].outcome is None
    assert get_fault_counts(rollouts)["consoles_lost"] == MAX_ATTEMPTS
    assert get_fault_counts(rollouts)["rollouts_replayed"] == MAX_ATTEMPTS - 1
    assert get_fault_counts(rollouts)["rollouts_given_up"] == 1


def test_a_run_all_of_whose_consoles_are_lost_again_and_again_stops_with_one_line() -> None:
    with pytest.raises(
        UnrecoverableError, match=r"^sandbox inprocess is 'lost in each of 6 rollouts, 3 times"
    ) as raised:
        play(1000)
    assert raised.value.exit_code == 3


def test_a_sampler_that_swallows_the_loss_does_not_keep_its_rollout() -> None:
    class Swallowing(ReplSampler):
        async def rollout(self, episode: Episode) -> None:
            try:
                await super().rollout(episode)
            except SandboxFault:
                episode.submit("42")

    found, rollouts = play(2, sampler=Swallowing())
    assert [t.outcome for t in found] == [1.0] * 6
    assert get_fault_counts(rollouts)["rollouts_replayed"] == 2


def fork_servers() -> list[psutil.Process]:
    """Processes of ours that hold all consoles of a `local` sandbox."""
    return [child for child in psutil.Process().children() if "bwrap" in child.name()]


def kill_fork_server() -> None:
    """Returns when its consoles are gone too: they die with it, but on a busy machine not in the same moment."""
    servers = fork_servers()
    held = [each for server in servers for each in server.children(recursive=True)]
    for server in servers:
        os.kill(server.pid, signal.SIGKILL)
    _, left = psutil.wait_procs(held, timeout=30)
    assert left == []


def test_consoles_that_die_with_their_fork_server_are_lost_and_not_killed_by_their_lines() -> None:
    async def lost(session: SandboxSession, line: str) -> bool:
        try:
            await session.push(line)
        except SandboxLost:
            return session.ended
        return False

    async def work() -> None:
        async with (
            open_sandbox("local", warm=3) as sandbox,
            sandbox.session() as busy,
            sandbox.session() as idle,
        ):
            await busy.push("import time")
            await idle.push("1")
            computing = asyncio.create_task(lost(busy, "time.sleep(3)"))
            await asyncio.sleep(0)
            kill_fork_server()
            assert await computing, "in the middle of a line"
            assert await lost(idle, "2"), "between two lines"
            for _ in range(4):
                async with sandbox.session() as session:
                    assert (await session.push("6 * 7")).text == "42\n", "one that waited in the pool has died too"

    asyncio.run(work())


def stop_fork_server() -> psutil.Process:
    """SIGSTOP to a fork server without consoles; returns the process above it."""
    (server,) = fork_servers()
    *_, forks = server.children(recursive=True)
    forks.suspend()
    return server


def test_a_fork_server_that_stands_still_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        server = await ForkServer.start(make_local_launcher(()), fork_timeout_s=2.0)
        source = SharedForkServer(make_local_launcher(()), Limits(), server)
        try:
            stopped = stop_fork_server()
            with pytest.raises(SandboxFault, match="the fork server hangs: it forked no process for 2 s"):
                await source.open_console()
            session = await source.open_console()
            assert (await session.push("6 * 7")).text == "42\n"
            session.close()
            assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE
        finally:
            await source.close()

    asyncio.run(work())
    assert "the fork server is gone" in caplog.text


def test_a_workspace_is_not_blamed_for_a_fork_server_that_stands_still() -> None:
    async def work() -> None:
        server = await ForkServer.start(make_local_launcher(()), fork_timeout_s=2.0)
        source = SharedForkServer(make_local_launcher(()), Limits(cpu_s=1.0), server)
        try:
            stop_fork_server()
            with pytest.raises(SandboxFault, match="the fork server hangs"):
                await source.prepare_workspace(Workspace(lines=("x = 1",)))
        finally:
            await source.close()

    asyncio.run(work())


def test_a_step_whose_fork_server_is_killed_has_full_groups() -> None:
    class Killing(ReplSampler):
        """Kills the fork server when the third rollout has begun."""

        begun = 0

        async def rollout(self, episode: Episode) -> None:
            line = await episode.sample()
            await episode.push(line)
            self.begun += 1
            if self.begun == 3:
                kill_fork_server()
            await super().rollout(episode)

    async def work() -> tuple[list[Trajectory], Rollouts]:
        async with open_sandbox("local", warm=2) as sandbox:
            rollouts = replace(world(LINES, Killing(), concurrency=3), sandbox=sandbox)
            return await rollouts.collect([TASK] * 6), rollouts

    found, rollouts = asyncio.run(work())
    assert [(t.stop, t.outcome, t.id) for t in found] == [(Stop.ANSWERED, 1.0, f"0-t1-{n}") for n in range(6)]
    assert 1 <= get_fault_counts(rollouts)["consoles_lost"] == get_fault_counts(rollouts)["rollouts_replayed"] <= 3


def test_a_fork_server_whose_start_is_cancelled_leaves_no_process() -> None:
    async def work() -> list[psutil.Process]:
        starting = asyncio.create_task(ForkServer.start(make_local_launcher(())))
        for _ in itertools.count():
            started = [each for top in fork_servers() for each in (top, *top.children())]
            if len(started) == 2:  # the one that we wait for, and the one that waits for it
                break
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait({starting})
        assert starting.cancelled()
        return started

    _, left = psutil.wait_procs(asyncio.run(work()), timeout=10)
    assert left == []


OPTIONS = json.dumps({"isolate": False, "preload": []})
LAUNCH = ProcessLauncher(
    (sys.executable, str(find_asset("sandbox/repl_kernel/fork_server_main.py")), "{fd}", OPTIONS),
    False,
    False,
    lambda _: "wait",
)


@dataclass
class Away:
    """A daemon that is away for some tries."""

    tries: int
    isolates_consoles: bool = False
    uses_own_uids: bool = False
    find_remedy: Callable[[str], str] = LAUNCH.find_remedy

    async def start(self) -> tuple[socket.socket, RunningProcess]:
        self.tries -= 1
        if self.tries >= 0:
            raise SandboxUnavailable("no daemon answers")
        return await LAUNCH.start()


@pytest.mark.parametrize("away", [3, 4])
def test_a_daemon_that_is_restarted_is_waited_for_by_all_at_once(away: int) -> None:
    async def work() -> None:
        server = await ForkServer.start(LAUNCH)
        daemon = Away(away)
        source = SharedForkServer(daemon, Limits(), server, patience_s=(0.0,) * 3)
        await server.stop()
        found = await asyncio.gather(*(source.open_console() for _ in range(3)), return_exceptions=True)
        try:
            if away == 3:
                assert not [one for one in found if isinstance(one, BaseException)]
            else:
                assert [type(one) for one in found] == [SandboxLost] * 3
                assert daemon.tries == 0, "tried for all of them together"
        finally:
            for one in found:
                if not isinstance(one, BaseException):
                    one.close()
            await source.close()

    asyncio.run(work())

"""What strikes a fleet on Ray, at random moments: every round is played to its end, as it is played undisturbed.

Real actors, machines and consoles, and a scripted engine whose draws hang on its weights; where its process is struck,
one that dies without it, as vLLM does. `REPL_RL_STRIKES` says how often each kind strikes and `REPL_RL_STRIKES_SEED` at
which moments. Both are printed, and what each kind cost.
"""

import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import psutil
import pytest
import ray
from ray._private.node import Node as Machine

from repl_rl.errors import UnrecoverableError
from repl_rl.ray.config import RayOptions
from repl_rl.ray.remote_rollouts import RolloutWorkers, WorkerPlan
from repl_rl.ray.start_local_cluster import STORE_BYTES, add_machine, list_machine_processes, remove_machine
from repl_rl.ray.worker_cluster import StartedCluster, open_ray_cluster
from repl_rl.ray.worker_pool import WorkerTimeouts
from repl_rl.rollout import SyncRollouts
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.processes import list_descendants
from tests.support.processes import command, identity, wait_for
from tests.support.ray.memory_cluster import IDS, TASKS, setting, weights
from tests.support.ray.scripted_workers import ENGINE, LIMITS, processed, rollouts, weighed
from tests.support.strip_timings import untimed

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
COUNT = int(os.environ.get("REPL_RL_STRIKES", "20"))
SEED = int(os.environ.get("REPL_RL_STRIKES_SEED") or random.SystemRandom().randrange(1_000_000))
WAITS = WorkerTimeouts(
    heartbeat_interval_s=0.5,
    heartbeat_timeout_s=6,
    load_timeout_s=20,
    poll_interval_s=0.5,
    retry_backoff_s=0.1,
    no_worker_timeout_s=120,
)
VERSIONS = 4
"""Of the weights."""
LEFT_S = 5
"""How long what was struck may be there."""
RAYS_S = 60
"""How long Ray's own agents may outlive the raylet of their machine; nobody but that machine can end them."""
_MIB = 1 << 20
Remains = set[tuple[int, str]]


@dataclass(slots=True)
class Tally:
    """What the strikes of a kind came to."""

    held: int = 0
    lost_s: list[float] = field(default_factory=list)
    """Beyond rounds that were not struck."""
    gone_s: list[float] = field(default_factory=list)
    """Until nothing was left of what was struck."""


class Arena:
    """A fleet that plays round after round, with other weights each time."""

    def __init__(
        self,
        started: StartedCluster,
        source: RolloutWorkers,
        expected: Mapping[int, Sequence[Trajectory]],
        folder: Path,
    ) -> None:
        assert started.machines is not None
        self.machines, self.source, self.dice = started.machines, source, random.Random(SEED)
        self._expected, self._folder = expected, folder
        self._step = 0
        self._usual_s = 0.0

    def get_ready(self) -> None:
        """Have two nodes, and learn how long a round takes."""
        wait_for(lambda: len(self.pids()) == 2, None)
        self.round()
        self._usual_s = statistics.median(self.round() for _ in range(3))

    def get_back(self) -> None:
        """Play on until there are two nodes again: one that comes is given its weights while the fleet is at work."""
        begun_s = time.monotonic()
        while len(self.pids()) < 2:
            self.round()
            assert time.monotonic() < begun_s + 120

    def pids(self) -> dict[str, int]:
        """Of nodes that can play, by seat."""
        return {member.slot: member.heartbeat.pid for member in self.source.pool.ready_workers if member.heartbeat.pid}

    def hand_over(self) -> None:
        """Give all nodes other weights."""
        self._step = self._step % VERSIONS + 1
        self.source.load_weights(self._folder / str(self._step), self._step)

    def round(self) -> float:
        """Play one, and see that it is what it is undisturbed. Returns how long it took, seconds."""
        begun_s = time.monotonic()
        self.hand_over()
        assert untimed(self.source.collect(IDS, self._step)) == self._expected[self._step]
        return time.monotonic() - begun_s

    def strike(self, blow: Callable[[], Remains], over: Callable[[], bool], tally: Tally) -> None:
        """Let it strike at a random moment of a round, and play on until it is `over` and the dead are gone."""
        struck = threading.Event()
        begun_s = time.monotonic()
        with ThreadPoolExecutor(1) as beside:  # Ray starts machines in the main thread alone
            playing = beside.submit(self._rounds_until, lambda: struck.is_set() and over())
            try:
                signal.sigtimedwait([], self.dice.uniform(0, self._usual_s))
                remains, struck_s = blow(), time.monotonic()
                while (here := left(remains)) and time.monotonic() < struck_s + LEFT_S:
                    signal.sigtimedwait([], 0.05)
            finally:
                struck.set()
            gone_s = time.monotonic() - struck_s
            rounds = playing.result()
        assert not here, "something is left of what it struck"
        tally.lost_s.append(max(0.0, time.monotonic() - begun_s - rounds * self._usual_s))
        self.round()
        tally.gone_s.append(gone_s)
        tally.held += 1

    def _rounds_until(self, over: Callable[[], bool]) -> int:
        """Play until it is over. Returns how many."""
        rounds = 0
        while not over():
            self.round()
            rounds += 1
        return rounds

    def rounds(self) -> None:
        """Play until it fails."""
        while True:
            self.round()

    def machine(self, seat: str) -> Machine:
        """The machine of a seat."""
        return next(one for one in self.machines.worker_nodes if one.node_id[:6] in seat)


def left(remains: Remains) -> list[str]:
    """What is still there of processes, and of what they keep in shared memory."""
    kept = [str(file) for file in Path("/dev/shm").iterdir() for pid, _ in remains if f"-{pid}-" in file.name]
    return [f"{one[0]} {command(one[0])[:200]}" for one in remains if identity(one[0]) == one] + kept


def family(pid: int) -> Remains:
    """A process, and all that it and its children have started."""
    return identities([pid, *list_descendants(pid)])


def identities(pids: Iterable[int]) -> Remains:
    """Processes, by what no later one can be mistaken for."""
    return {found for pid in pids if (found := identity(pid)) is not None}


def signalled(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights, a folder for each version."""
    made = tmp_path_factory.mktemp("weights")
    for step in range(1, VERSIONS + 1):
        weights(made / str(step), bytes([step]) * (4 * _MIB))
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> Mapping[int, Sequence[Trajectory]]:
    """Each version's round, undisturbed and in this process."""
    found: dict[int, Sequence[Trajectory]] = {}
    with SyncRollouts(weighed, {task.id: task for task in TASKS}) as source:
        for step in range(1, VERSIONS + 1):
            source.load_weights(folder / str(step), step)
            found[step] = untimed(source.collect(IDS, step))
    versions = [[replace(t, policy_step=0) for t in played] for played in found.values()]
    assert all(one != other for n, one in enumerate(versions) for other in versions[:n])
    return found


@pytest.fixture(scope="module")
def started() -> Iterator[StartedCluster]:
    with open_ray_cluster(RayOptions("", 2, 1, True, 120.0)) as cluster:
        yield cluster


class Open(Protocol):
    """Opens a fleet."""

    def __call__(self, waits: WorkerTimeouts, world: Callable[[int], object] = weighed) -> Arena: ...


@pytest.fixture
def fleet(started: StartedCluster, expected: Mapping[int, Sequence[Trajectory]], folder: Path) -> Iterator[Open]:
    """Opens a fleet of two nodes to which weights are sent."""
    with ExitStack() as stack:

        def opened(waits: WorkerTimeouts, world: Callable[[int], object] = weighed) -> Arena:
            plan = WorkerPlan(setting(world), rollouts().sampler, LIMITS, False, 6, 0, waits, shares_folder=False)
            tasks = {task.id: task for task in TASKS}
            source = stack.enter_context(RolloutWorkers(nullcontext(started.cluster), plan, tasks))
            arena = Arena(started, source, expected, folder)
            arena.get_ready()
            return arena

        yield opened


@contextmanager
def told(kind: str, capsys: pytest.CaptureFixture[str]) -> Iterator[Tally]:
    """Say what became of the strikes of a kind."""
    tally = Tally()
    try:
        yield tally
    finally:
        cost_s, gone_s = (max(taken, default=0.0) for taken in (tally.lost_s, tally.gone_s))
        held = f"seed {SEED}, {tally.held} of {COUNT} held"
        with capsys.disabled():
            print(f"\n{kind}: {held}; a strike cost {statistics.median(tally.lost_s or [0]):.1f} s in the middle and")
            print(f"{cost_s:.1f} s at most; its remains were there for {gone_s:.1f} s at most")


def test_an_actor_that_is_killed_at_any_moment_changes_nothing(fleet: Open, capsys: pytest.CaptureFixture[str]) -> None:
    arena = fleet(WAITS)
    with told("actor killed", capsys) as tally:
        for number in range(1, COUNT + 1):

            def blow() -> Remains:
                pid = arena.dice.choice(sorted(arena.pids().values()))
                remains = family(pid)
                signalled([pid], signal.SIGKILL)
                return remains

            arena.strike(blow, lambda: len(arena.source.pool.lost_workers) >= number, tally)  # noqa: B023
            arena.get_back()


def test_a_fork_server_that_is_killed_at_any_moment_changes_nothing_and_costs_no_node(
    fleet: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    arena = fleet(WAITS)

    def blow() -> Remains:
        node = psutil.Process(arena.dice.choice(sorted(arena.pids().values())))
        # What died of the strike before may be on its way.
        wait_for(lambda: any(child.name() == "bwrap" for child in node.children()), None)
        server = next(child for child in node.children() if child.name() == "bwrap")
        remains = family(server.pid)
        signalled([server.pid], signal.SIGKILL)
        return remains

    with told("fork server killed", capsys) as tally:
        for _ in range(COUNT):
            arena.strike(blow, lambda: True, tally)
        assert not arena.source.pool.lost_workers


def test_an_engine_that_is_killed_at_any_moment_changes_nothing_and_costs_no_node(
    fleet: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    arena = fleet(WAITS, processed)

    def engines(pid: int) -> list[psutil.Process]:
        return [child for child in psutil.Process(pid).children() if command(child.pid).startswith(ENGINE)]

    def blow() -> Remains:
        pid = arena.dice.choice(sorted(arena.pids().values()))
        wait_for(lambda: engines(pid), None)  # what died of the strike before may be on its way
        (engine,) = engines(pid)
        remains = family(engine.pid)
        signalled([engine.pid], signal.SIGKILL)
        return remains

    with told("engine killed", capsys) as tally:
        for _ in range(COUNT):
            arena.strike(blow, lambda: True, tally)
        assert not arena.source.pool.lost_workers


def test_a_hand_over_of_weights_whose_peer_is_killed_or_frozen_ends_in_time(
    fleet: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    arena = fleet(WAITS)
    with told("peer of a hand-over killed or frozen", capsys) as tally:
        for number in range(1, COUNT + 1):
            harm = arena.dice.choice((signal.SIGKILL, signal.SIGSTOP))
            pid = arena.dice.choice(sorted(arena.pids().values()))
            remains = family(pid)
            timer = threading.Timer(arena.dice.uniform(0, 0.2), signalled, [[pid], harm])
            timer.start()
            begun_s = time.monotonic()
            while len(arena.source.pool.lost_workers) < number:
                loading_s = time.monotonic()
                arena.hand_over()
                assert time.monotonic() - loading_s < WAITS.heartbeat_timeout_s + WAITS.heartbeat_interval_s + 5
            tally.lost_s.append(time.monotonic() - begun_s)
            timer.join()
            wait_for(lambda: not left(remains), None, LEFT_S)  # noqa: B023
            arena.round()
            tally.held += 1
            arena.get_back()


def test_a_raylet_that_is_killed_at_any_moment_changes_nothing(fleet: Open, capsys: pytest.CaptureFixture[str]) -> None:
    arena = fleet(WAITS)
    with told("raylet killed", capsys) as tally:
        for _ in range(COUNT):
            seat, pid = arena.dice.choice(sorted(arena.pids().items()))
            machine, rays = arena.machine(seat), set[tuple[int, str]]()

            def blow() -> Remains:
                (raylet,) = machine.all_processes["raylet"]  # noqa: B023
                rays.update(identities(list_machine_processes(machine)))  # noqa: B023
                remains = family(pid)  # noqa: B023
                signalled([raylet.process.pid], signal.SIGKILL)
                return remains

            arena.strike(blow, lambda: pid not in arena.pids().values(), tally)  # noqa: B023
            wait_for(lambda: not left(rays), None, RAYS_S)  # noqa: B023
            remove_machine(arena.machines, machine)
            add_machine(arena.machines, num_cpus=1)
            arena.get_back()


def test_a_machine_that_goes_and_one_that_comes_at_any_moment_change_nothing(
    fleet: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    arena = fleet(WAITS)
    with told("machine removed", capsys) as gone, told("machine added", capsys) as come:
        for _ in range(COUNT):
            seat, pid = arena.dice.choice(sorted(arena.pids().items()))

            def remove() -> Remains:
                machine = arena.machine(seat)  # noqa: B023
                remains = identities(list_machine_processes(machine))
                remove_machine(arena.machines, machine)
                return remains

            def add() -> Remains:
                add_machine(arena.machines, num_cpus=1)
                return set()

            arena.strike(remove, lambda: pid not in arena.pids().values(), gone)  # noqa: B023
            arena.strike(
                add, lambda: [m.groups_played > 0 for m in arena.source.pool.ready_workers] == [True, True], come
            )


def test_a_machine_that_is_frozen_at_any_moment_and_thawed_later_changes_nothing(
    fleet: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    arena = fleet(WAITS)
    with told("machine frozen and thawed", capsys) as tally:
        for _ in range(COUNT):
            seat, pid = arena.dice.choice(sorted(arena.pids().items()))
            machine = arena.machine(seat)
            frozen_s = arena.dice.uniform(1, 2 * WAITS.heartbeat_timeout_s)
            losses = len(arena.source.pool.lost_workers)
            long = frozen_s > WAITS.heartbeat_timeout_s + WAITS.heartbeat_interval_s

            def blow() -> Remains:
                remains, node = identities(list_machine_processes(machine)), family(pid)  # noqa: B023
                signalled([one for one, _ in remains], signal.SIGSTOP)
                signal.sigtimedwait([], frozen_s)  # noqa: B023
                signalled([one for one, _ in remains], signal.SIGCONT)
                return node if long else set()  # noqa: B023

            arena.strike(blow, lambda: True, tally)
            lost = len(arena.source.pool.lost_workers) - losses
            assert lost == 1 if long else lost <= 1
            arena.get_back()


def test_an_object_store_that_others_fill_at_any_moment_changes_nothing(
    fleet: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    arena = fleet(WAITS)
    with told("object store full", capsys) as tally:
        for _ in range(COUNT):
            held: list[object] = []

            def blow() -> Remains:
                for _ in range(arena.dice.randrange(4, 24)):
                    held.append(ray.put(arena.dice.randbytes(16 * _MIB)))  # noqa: B023
                return set()

            arena.strike(blow, lambda: True, tally)
        assert not arena.source.pool.lost_workers


def test_weights_larger_than_the_object_store_arrive_all_the_same(fleet: Open, tmp_path: Path) -> None:
    arena = fleet(replace(WAITS, load_timeout_s=120))
    large = weights(tmp_path / "large", bytes(STORE_BYTES + 16 * _MIB))
    arena.source.load_weights(large, 7)
    assert {t.policy_step for t in arena.source.collect(IDS, 7)} == {7}
    assert not arena.source.pool.lost_workers


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_run_all_of_whose_machines_are_gone_stops_in_time_with_last_words(
    harm: signal.Signals, fleet: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = replace(WAITS, no_worker_timeout_s=30)  # of which the first nodes have to start, too
    arena = fleet(waits)
    raylets = [machine.all_processes["raylet"][0].process.pid for machine in arena.machines.worker_nodes]
    remains = identities(pid for machine in arena.machines.worker_nodes for pid in list_machine_processes(machine))
    struck_s: list[float] = []

    def blow() -> None:
        signalled([pid for pid, _ in remains] if harm == signal.SIGSTOP else raylets, harm)
        struck_s.append(time.monotonic())

    timer = threading.Timer(arena.dice.uniform(0, 2), blow)
    timer.start()
    try:
        with pytest.raises(UnrecoverableError) as raised:
            arena.rounds()
        took_s = time.monotonic() - struck_s[0]
        assert took_s < waits.no_worker_timeout_s + 10
        assert raised.value.exit_code == 3
        assert all(f"node {number} at " in str(raised.value) for number in (0, 1))
    finally:
        timer.join()
        signalled([pid for pid, _ in remains], signal.SIGCONT)
        for machine in list(arena.machines.worker_nodes) if harm == signal.SIGKILL else ():
            remove_machine(arena.machines, machine)
            add_machine(arena.machines, num_cpus=1)
    with capsys.disabled():
        patience_s = waits.no_worker_timeout_s
        print(f"\nall machines {harm.name}: the run stopped after {took_s:.1f} s, patience {patience_s:g} s")

"""Synchronous client of a worker pool for trainer and evaluation; `RolloutThread` is the client of a single process."""

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType, TracebackType

from repl_rl.engine.base import Pressure
from repl_rl.machine.files import Json, write_whole
from repl_rl.machine.heap import rare_collections
from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout.again import Broken, Part
from repl_rl.rollout.early import Busy
from repl_rl.rollout.facts import Facts, Figures, counted
from repl_rl.rollout.fleet.crew import Crew
from repl_rl.rollout.fleet.members import Member, Waits
from repl_rl.rollout.fleet.messages import Cluster, Group, Setting, Weights
from repl_rl.rollout.fleet.node import checksum
from repl_rl.rollout.lengths import Lengths
from repl_rl.rollout.limits import RolloutLimits
from repl_rl.rollout.sampler import RolloutSampler
from repl_rl.rollout.step import Places, Step, first_ended
from repl_rl.rollout.thread import Alter, LoopThread, UnderWay
from repl_rl.tasks import Task

log = logging.getLogger(__name__)

STATUS, LOGS = "fleet.json", "fleet"
"""Names in a run's folder: the state of the workers, and the folder of their logs."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Configuration of a worker pool."""

    setting: Setting
    sampler: RolloutSampler
    """Sampler for the metrics of this process; the workers have their own."""
    limits: RolloutLimits
    host: bool
    """True if lines may call host functions."""
    concurrency: int
    """Concurrent rollouts per worker, >= 1."""
    nodes: int = 0
    """Largest number of workers; 0 means one per slot."""
    waits: Waits = field(default_factory=Waits)
    shared: bool = True
    """True if workers may read weights from the owner's folder; False sends the files in any case."""


class NodeFleet:
    """Context manager that opens and closes the workers of a cluster together. It implements `Fleet`."""

    def __init__(self, cluster: AbstractContextManager[Cluster], plan: Plan, tasks: Mapping[str, Task]) -> None:
        self.tasks = tasks
        """Tasks by id."""
        self._cluster, self._plan = cluster, plan
        self._stack = ExitStack()
        self._lengths = Lengths()
        self._before = Figures(asdict(Broken()))
        self._told: dict[str, Figures] = {}
        self._preempted = 0
        self._early: dict[int, tuple[Step, UnderWay[list[Trajectory]]]] = {}
        self._busy = Busy()
        self._notes: Path | None = None
        self._over = False

    def __enter__(self) -> "NodeFleet":
        # If a later step fails, this stack closes everything that is already open.
        with ExitStack() as stack:
            cluster = stack.enter_context(self._cluster)
            stack.enter_context(rare_collections())
            plan = self._plan
            self._thread = LoopThread()
            stack.callback(self._thread.close)
            self.crew = Crew(
                cluster, plan.setting, plan.concurrency, plan.nodes, plan.waits, plan.shared, heard=self._heard
            )
            stack.callback(lambda: self._thread.run(self.crew.end()))
            self.facts: Facts = self._thread.run(self.crew.begin())
            """See `Fleet.facts`."""
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._write_status()
        with self._stack:
            for _, rollouts in self._early.values():
                rollouts.end()

    @property
    def forbidden_ids(self) -> frozenset[int]:
        """See `Fleet.forbidden_ids`."""
        return self.facts.forbidden_ids

    @property
    def figures(self) -> Figures:
        """See `Fleet.figures`; as reported by the latest heartbeats."""
        told = [self._before, *list(self._told.values())]  # a copy, because the event loop adds to it
        # Each worker counts from its start, and the checkpoint holds the counts of earlier processes.
        faults = {name: sum(one.faults.get(name, 0) for one in told) for name in self._before.faults}
        pressures = [one.pressure for one in told if one.pressure is not None]
        preempted, recomputed = (sum(getattr(p, f.name) for p in pressures) for f in fields(Pressure))
        return Figures(faults, Pressure(preempted, recomputed) if pressures else None)

    def collect(self, task_ids: Sequence[str], policy_step: int) -> Sequence[Trajectory]:
        """See `Fleet.collect`. Prefetched rollouts are awaited."""
        if policy_step in self._early:
            step, rollouts = self._early.pop(policy_step)
            pressure, played = step.pressure, self._learned(step.tasks, rollouts.wait())
        else:
            pressure = self._pressure
            played = self._play([self.tasks[i] for i in task_ids], 1.0, policy_step, None)
        self._preempted = self._pressure.since(pressure).preempted
        return played

    @property
    def _pressure(self) -> Pressure:
        return self.figures.pressure or Pressure()

    def sample(
        self, tasks: Sequence[Task], temperature: float = 1.0, alter: Alter | None = None
    ) -> Sequence[Trajectory]:
        """See `Fleet.sample`."""
        return self._play(tasks, temperature, self.crew.policy_step, alter)

    def _play(
        self, tasks: Sequence[Task], temperature: float, policy_step: int, alter: Alter | None
    ) -> list[Trajectory]:
        step = Step(tasks, self._lengths.longest_first(tasks))
        groups = [Group(task, len(places), temperature, policy_step, alter) for task, places in step.groups]
        return self._learned(tasks, step.played(self._thread.run(self.crew.play(groups)), self.facts.sandbox))

    def _learned(self, tasks: Sequence[Task], played: list[Trajectory]) -> list[Trajectory]:
        for task, trajectory in zip(tasks, played, strict=True):
            self._lengths.learn(task, trajectory)
        return played

    def begin(
        self, task_ids: Sequence[str], policy_step: int, finished: Mapping[int, Trajectory] = MappingProxyType({})
    ) -> None:
        """Start rollouts as `RolloutThread.begin` does.

        They start with the current weights or newer ones, on any worker. Groups of earlier steps get a worker first.
        """
        tasks = [self.tasks[i] for i in task_ids]
        whole = {n: replace(t, workspace=tasks[n].workspace) for n, t in finished.items()}  # a record only names it
        step = Step(tasks, self._lengths.longest_first(tasks), whole, self._pressure)
        groups = [
            Group(task, len(places), 1.0, policy_step, None, self.crew.policy_step, step.before(places))
            for task, places in step.groups
        ]
        self._early[policy_step] = step, self._thread.begin(self._played(step, groups))

    async def _played(self, step: Step, groups: Sequence[Group]) -> list[Trajectory]:
        self._busy.begin()
        try:
            return step.played(await self.crew.play(groups, step.parts), self.facts.sandbox)
        finally:
            self._busy.end()
            step.over = True

    def finished(self, policy_step: int) -> Mapping[int, Trajectory]:
        """Return the rollouts of a later step that ended without a failure, by number in the step.

        A rollout is included once its whole group has ended.
        """
        step, _ = self._early[policy_step]
        return step.finished

    def first(self, groups: Sequence[Places]) -> int:
        """Wait until one of these groups of later steps has ended. Return the index of the first one that has.

        Raises:
            BrokenDown: no worker was ready for too long.
        """

        def number() -> int | None:
            return first_ended(groups, lambda policy_step: self._early[policy_step][0])

        self._thread.run(self.crew.until(lambda: number() is not None))
        found = number()
        assert found is not None, "what has ended stays so"
        return found

    def ended(self, policy_step: int) -> Mapping[int, Trajectory]:
        """Return the rollouts of a later step whose groups have ended, by number in the step.

        They are the trajectories that `collect` will return.
        """
        return self._early[policy_step][0].ended

    def probe(self, task_id: str) -> Sequence[Trajectory]:
        """Sample the first line of the current policy on a task, on each worker."""
        group = Group(self.tasks[task_id], 1, 1.0, self.crew.policy_step, look=True)
        return Part.of(self._thread.run(self.crew.look(group))).trajectories

    @property
    def busy_s(self) -> float:
        """Wall-clock time in which prefetched rollouts ran, seconds."""
        return self._busy.elapsed_s

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """See `Fleet.metrics`; with the numbers of ready workers, lost workers, and groups started again."""
        plan, figures = self._plan, self.figures
        preempted = None if figures.pressure is None else self._preempted
        told = counted(plan.sampler, plan.limits, plan.host, trajectories, preempted, figures.faults)
        return {**told, **self.crew.counts}

    def load_weights(self, folder: Path, policy_step: int) -> None:
        """See `Fleet.load_weights`."""
        folder = folder.absolute()
        self._thread.run(self.crew.load(Weights(str(folder), policy_step, checksum(folder))))

    def memory(self) -> str:
        """See `Fleet.memory`. A run may resume from it in one process too."""
        return json.dumps({"lengths": self._lengths.memory(), "broken": dict(self.figures.faults)})

    def remember(self, memory: str) -> None:
        """See `Fleet.remember`."""
        told = json.loads(memory)
        self._lengths.remember(told["lengths"])
        self._before = Figures({**self._before.faults, **told.get("broken", {})})

    def keep_notes(self, folder: Path) -> None:
        """Write the state of the workers into a run's folder from now on.

        The files are `fleet.json`, and one log per worker in `fleet/`.
        """
        (folder / LOGS).mkdir(exist_ok=True)
        self._notes = folder
        self._write_status()

    def _heard(self, member: Member) -> None:
        """Store the heartbeat of a worker. It runs in the event loop."""
        self._told[member.name] = member.beat.figures
        if self._notes is not None and member.beat.log:
            # A log that cannot be written must not end the worker.
            with suppress(OSError), self._log_of(member).open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in member.beat.log)
        self._write_status()

    def _log_of(self, member: Member) -> Path:
        return (self._notes or Path()) / LOGS / f"{member.name.replace(' ', '-')}.log"

    def _write_status(self) -> None:
        if self._notes is None:
            return
        try:
            write_whole(self._notes / STATUS, json.dumps(self.status(), indent=1) + "\n")
        except OSError as error:  # the trainer meets the same error and reports it
            log.warning("what the fleet does cannot be written to %s: %s", self._notes, error)

    def status(self) -> dict[str, Json]:
        """Return the state of present and lost workers, for people and files."""
        return {
            "cluster": self.crew.cluster_name,
            "policy_step": self.crew.policy_step,
            "nodes": [told(member, self._over) for member in list(self.crew.members.values())],
            "lost": [asdict(one) for one in self.crew.lost],
            "groups_replayed": self.crew.replayed,
        }


def told(member: Member, over: bool) -> dict[str, Json]:
    """Return the state of one worker. `over` means that the pool ends."""
    beat = member.beat
    return {
        "name": member.name,
        "seat": member.seat,
        "pid": beat.pid,
        "state": "ended" if over else member.state,
        "policy_step": beat.policy_step,
        "rollouts": beat.rollouts,
        "groups": member.groups,
        "rollouts_played": beat.played,
        "tokens": beat.tokens,
        "faults": sum(beat.figures.faults.values()),
    }

"""Continuations of a stored trajectory from the middle: what the policy would do from here, and how it ends."""

import zlib
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from statistics import fmean

from repl_rl.errors import ConfigError
from repl_rl.record.console import PS1, PS2, Typist
from repl_rl.record.trajectory import LineEnd, Observed, Prompt, Sampled, Segment, Stop, Trajectory
from repl_rl.rollout import Rollouts, RolloutSampler
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.host import of_record
from repl_rl.rollout.renderer import Renderer
from repl_rl.runs.replay.session import Replay, Step, check
from repl_rl.tasks import Task, Workspace


@dataclass(frozen=True, slots=True)
class Start:
    """The middle of a trajectory, from which others go on."""

    trajectory: Trajectory
    line: int
    """Recorded lines that lie behind."""
    prompt: Prompt
    segments: tuple[Segment, ...]
    """What follows the prompt, with the recorded ids."""
    ran: tuple[str, ...]
    """The physical lines that the console is given to have its state back, in order."""
    carry: str = ""
    """What was written after the last newline: the next line goes on from it."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What the policy goes on from, prompt included."""
        return (*self.prompt.token_ids, *(i for segment in self.segments for i in segment.token_ids))


@dataclass(frozen=True, slots=True)
class Branches:
    """Continuations from one start."""

    start: Start
    trajectories: tuple[Trajectory, ...]
    """Whole trajectories: what was recorded before the start, then what the policy did."""

    @property
    def value(self) -> float | None:
        """Mean outcome: what it is worth to be here. None: nothing was graded."""
        outcomes = [t.outcome for t in self.trajectories if t.outcome is not None]
        return fmean(outcomes) if outcomes else None


def start_at(trajectory: Trajectory, line: int) -> Start:
    """The point after the first `line` lines, as they were recorded.

    Raises:
        ConfigError: there is no such point: too many lines, or one that ended the rollout, or no console's lines.
    """
    check(trajectory)
    if not 0 <= line <= len(trajectory.lines):
        raise ConfigError("line to branch from", line, f"give 0 to {len(trajectory.lines)}")
    segments: list[Segment] = []
    left = line
    for segment in trajectory.segments:
        if isinstance(segment, Observed):
            segments.append(segment)
        elif left == 0:
            break
        else:
            segments.append(Sampled(segment.lines[:left]))
            left = max(0, left - len(segment.lines))
    typist = Typist()
    runs = [(each, each.execution) for each in trajectory.lines[:line] if each.execution is not None]
    for each, run in runs:
        typist.typed(each.text, run.ran, each.end is LineEnd.EOS)
    last = trajectory.lines[line - 1].execution if line else None
    over = trajectory.stop is Stop.EOS and line == len(trajectory.lines)
    if over or (last is not None and (last.answer is not None or not isinstance(segments[-1], Observed))):
        raise ConfigError("line to branch from", line, "the rollout ended with that line; give a smaller number")
    ran = tuple(physical for _, run in runs for physical in run.ran)
    return Start(trajectory, line, trajectory.prompt, tuple(segments), ran, typist.carry)


def start_of(replay: Replay, renderer: Renderer) -> Start:
    """The point where a replay stands. From the first typed line on, all text counts as observed: masked, not trained.

    Raises:
        ConfigError: the console has ended.
    """
    typed = next((i for i, step in enumerate(replay.steps) if step.recorded is None), None)
    if typed is None:
        return start_at(replay.trajectory, replay.position)
    if replay.steps[-1].result.answer is not None or not replay.steps[-1].shown.text.endswith((PS1, PS2)):
        raise ConfigError("console", "ended", "nothing can follow; open a fresh replay")
    first = next((step.line for step in replay.steps[typed:] if step.line is not None), replay.position)
    start = start_at(replay.trajectory, first)
    for step in replay.steps[typed:]:
        start = _append_step(start, step, renderer)
    return replace(start, line=replay.position)


def _append_step(start: Start, step: Step, renderer: Renderer) -> Start:
    """`start` with the text of a step appended that no policy wrote."""
    shown = step.text + step.shown.text
    before = start.segments[-1] if start.segments else start.prompt
    withheld = not isinstance(before, Sampled) and renderer.withholds_space(before)
    ids = renderer.splice(f" {shown}" if withheld and not shown.startswith("\n") else shown)
    start = replace(start, ran=(*start.ran, *step.ran), carry="")
    if not start.segments:
        return replace(start, prompt=Prompt(start.prompt.text + shown, (*start.prompt.token_ids, *ids)))
    last = start.segments[-1]
    if isinstance(last, Observed):
        merged = Observed(last.text + shown, (*last.token_ids, *ids), last.cut or step.shown.cut)
        return replace(start, segments=(*start.segments[:-1], merged))
    return replace(start, segments=(*start.segments, Observed(shown, ids, step.shown.cut)))


class Continue(RolloutSampler):
    """Rebuilds a start, then lets another sampler go on from there."""

    def __init__(self, sampler: RolloutSampler, start: Start) -> None:
        self._sampler = sampler
        self._start = start

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        """The recorded one, bit for bit."""
        return self._start.prompt

    def opened(self) -> AbstractAsyncContextManager[None]:
        """That of the sampler that goes on."""
        return self._sampler.opened()

    async def on_start(self, episode: Episode) -> None:
        """That of the sampler that goes on."""
        await self._sampler.on_start(episode)

    async def on_end(self, rollout: str, result: Trajectory | BaseException) -> None:
        """That of the sampler that goes on."""
        await self._sampler.on_end(rollout, result)

    async def rollout(self, episode: Episode) -> None:
        await episode.restore(self._start.segments, self._start.ran, self._start.carry)
        if not episode.ended:
            await self._sampler.rollout(episode)


async def branch(rollouts: Rollouts, start: Start, task: Task | None, count: int, temperature: float = 1.0) -> Branches:
    """Sample `count` (>= 1) continuations of `start` with the policy and the sampler of `rollouts`.

    Every continuation begins with exactly the ids of `start`, in a console with the recorded workspace. `task` grades
    them; None: they stay ungraded. Calls of host functions before `start` are answered from the record; those after it
    are refused where `rollouts` has no such function.

    Raises:
        StoreError: the workspace is not stored.
        EngineError, UserCodeError, InvariantError: as `Rollouts.collect`.
    """
    origin = start.trajectory
    setup = Workspace.read(origin.workspace.content) if origin.workspace is not None else None
    graded = replace(task or Task(origin.task_id, origin.prompt.text, ""), workspace=setup)
    seed = rollouts.seed + zlib.crc32(f"{origin.id}/{start.line}".encode())
    known = {function.name for function in rollouts.host}
    host = (*rollouts.host, *(of_record(name) for name in origin.host_functions if name not in known))
    world = replace(rollouts, sampler=Continue(rollouts.sampler, start), seed=seed, host=host)
    found = await world.collect([graded] * count, temperature)
    taken_over = {c.child for line in origin.lines[: start.line] if line.execution for c in line.execution.calls}
    before = [child for child in origin.children if child.id in taken_over]
    named = (t.renamed(f"{origin.id}+{start.line}.{i}", before) for i, t in enumerate(found))
    return Branches(start, tuple(t if task else t.ungraded() for t in named))

"""Branches: continuations that the policy samples from the middle of a stored trajectory."""

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
    """Point in the middle of a trajectory from which branches continue."""

    trajectory: Trajectory
    line: int
    """Number of recorded lines before it."""
    prompt: Prompt
    segments: tuple[Segment, ...]
    """Segments after the prompt, with the recorded ids."""
    ran: tuple[str, ...]
    """Physical lines that rebuild the console's state, in order."""
    carry: str = ""
    """Text after the last newline; the next line continues it."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids that the policy continues from, prompt included."""
        return (*self.prompt.token_ids, *(i for segment in self.segments for i in segment.token_ids))


@dataclass(frozen=True, slots=True)
class Branches:
    """Continuations from one start."""

    start: Start
    trajectories: tuple[Trajectory, ...]
    """Complete trajectories: the recorded part before the start, then the policy's continuation."""

    @property
    def value(self) -> float | None:
        """Mean outcome, an estimate of the value of the start; None if no continuation was graded."""
        outcomes = [t.outcome for t in self.trajectories if t.outcome is not None]
        return fmean(outcomes) if outcomes else None


def start_at(trajectory: Trajectory, line: int) -> Start:
    """Return the point after the first `line` lines, as recorded.

    Raises:
        ConfigError: the trajectory has fewer lines, ended with that line, or was not run in a console.
    """
    check(trajectory)
    if not 0 <= line <= len(trajectory.lines):
        raise ConfigError("line to branch from", line, f"give 0 to {len(trajectory.lines)}")
    # Keep the segments before the point, and cut the one that contains it.
    segments: list[Segment] = []
    left = line
    for segment in trajectory.segments:
        if isinstance(segment, Observed):
            segments.append(segment)
        elif left == 0:
            break
        else:
            segments.append(Sampled(segment.lines[:left]))
            # An observation follows the whole segment, not a part of it.
            if left < len(segment.lines):
                break
            left -= len(segment.lines)
    # The typist finds the text after the last newline, which the next line continues.
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
    """Return the point that a replay has reached.

    From the first typed line on, all text counts as observation, so it is masked and not trained.

    Raises:
        ConfigError: the console has ended.
    """
    typed = next((i for i, step in enumerate(replay.steps) if step.recorded is None), None)
    if typed is None:
        return start_at(replay.trajectory, replay.position)
    if replay.steps[-1].result.answer is not None or not replay.steps[-1].shown.text.endswith((PS1, PS2)):
        raise ConfigError("console", "ended", "nothing can follow; open a fresh replay")
    # Recorded ids are valid only up to the first typed or replaced line; the rest is encoded again.
    first = next((step.line for step in replay.steps[typed:] if step.line is not None), replay.position)
    start = start_at(replay.trajectory, first)
    for step in replay.steps[typed:]:
        start = _append_step(start, step, renderer)
    return replace(start, line=replay.position)


def _append_step(start: Start, step: Step, renderer: Renderer) -> Start:
    """Return `start` with the text of a step appended as an observation."""
    shown = step.text + step.shown.text
    before = start.segments[-1] if start.segments else start.prompt
    # A withheld space has to be encoded with the text that follows it.
    withheld = not isinstance(before, Sampled) and renderer.withholds_space(before)
    ids = renderer.splice(f" {shown}" if withheld and not shown.startswith("\n") else shown)
    start = replace(start, ran=(*start.ran, *step.ran), carry="")
    # Text at the very beginning extends the prompt; text after an observation extends that.
    if not start.segments:
        return replace(start, prompt=Prompt(start.prompt.text + shown, (*start.prompt.token_ids, *ids)))
    last = start.segments[-1]
    if isinstance(last, Observed):
        merged = Observed(last.text + shown, (*last.token_ids, *ids), last.cut or step.shown.cut)
        return replace(start, segments=(*start.segments[:-1], merged))
    return replace(start, segments=(*start.segments, Observed(shown, ids, step.shown.cut)))


class Continue(RolloutSampler):
    """Sampler that rebuilds a start and then hands the episode to another sampler."""

    def __init__(self, sampler: RolloutSampler, start: Start) -> None:
        self._sampler = sampler
        self._start = start

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        """Return the recorded prompt, bit for bit."""
        return self._start.prompt

    def opened(self) -> AbstractAsyncContextManager[None]:
        """Return the resources of the continuing sampler."""
        return self._sampler.opened()

    async def on_start(self, episode: Episode) -> None:
        """Call `on_start` of the continuing sampler."""
        await self._sampler.on_start(episode)

    async def on_end(self, rollout: str, result: Trajectory | BaseException) -> None:
        """Call `on_end` of the continuing sampler."""
        await self._sampler.on_end(rollout, result)

    async def rollout(self, episode: Episode) -> None:
        await episode.restore(self._start.segments, self._start.ran, self._start.carry)
        if not episode.ended:
            await self._sampler.rollout(episode)


async def branch(rollouts: Rollouts, start: Start, task: Task | None, count: int, temperature: float = 1.0) -> Branches:
    """Sample `count` (>= 1) continuations of `start` with the policy and the sampler of `rollouts`.

    Every continuation begins with exactly the ids of `start`, in a console with the recorded workspace. `task` grades
    them; None leaves them ungraded. Calls of host functions before `start` are answered from the record. Later calls
    are refused if `rollouts` does not have the function.

    Raises:
        StoreError: the workspace is not stored.
        EngineError, UserCodeError, InvariantError: as `Rollouts.collect`.
    """
    origin = start.trajectory
    setup = Workspace.read(origin.workspace.content) if origin.workspace is not None else None
    graded = replace(task or Task(origin.task_id, origin.prompt.text, ""), workspace=setup)
    # Give each start its own seed, so that branches from different lines differ.
    seed = rollouts.seed + zlib.crc32(f"{origin.id}/{start.line}".encode())
    known = {function.name for function in rollouts.host}
    host = (*rollouts.host, *(of_record(name) for name in origin.host_functions if name not in known))
    world = replace(rollouts, sampler=Continue(rollouts.sampler, start), seed=seed, host=host)
    found = await world.collect([graded] * count, temperature)
    # Children of calls before the start belong to every branch.
    taken_over = {c.child for line in origin.lines[: start.line] if line.execution for c in line.execution.calls}
    before = [child for child in origin.children if child.id in taken_over]
    named = (t.renamed(f"{origin.id}+{start.line}.{i}", before) for i, t in enumerate(found))
    return Branches(start, tuple(t if task else t.ungraded() for t in named))

"""Recorder of a rollout: its lines and observations so far, in order. It only grows.

It is pure: it uses no engine, no console and no event loop. Segments are derived from the record, so a sampler cannot
mix up sampled and observed tokens.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from repl_rl.errors import ConfigError, InvariantError
from repl_rl.record.trajectory import (
    Execution,
    Failure,
    Line,
    LineEnd,
    LineStatus,
    NamedReward,
    Observed,
    Prompt,
    Sampled,
    Segment,
    Stop,
    Trajectory,
)
from repl_rl.tasks import Task


@dataclass(frozen=True, slots=True)
class Origin:
    """Start of a rollout, and the identity of its record."""

    id: str
    task: Task
    prompt: Prompt
    seed: int
    policy_step: int
    """Optimizer steps behind the policy that the rollout is for. Each line names the one that wrote it."""


def seed_of(name: str) -> int:
    """Return the seed (31 bits) of the rollout with that name, which is the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") >> 1


Heard = Callable[[Line | Observed], None]
"""Callback for each line when it is sampled, and again when it is executed, and for each observation."""


@dataclass(frozen=True, slots=True)
class Followed:
    """Requests of a client that follows a rollout, in addition to its limits."""

    heard: Heard = lambda item: None
    most_tokens: int | None = None
    """Largest number of ids to sample (>= 1). None leaves it to the limits."""
    stop: tuple[str, ...] = ()
    """Non-empty texts that end the rollout. The line in which one is written is the last, and does not run."""

    def wanted(self, text: str) -> str:
        """Return the part of a line before the first of the texts that end the rollout."""
        return text[: min((at for stop in self.stop if (at := text.find(stop)) >= 0), default=len(text))]


UNFOLLOWED = Followed()
"""Requests of a rollout that no client follows."""


class Record:
    """Lines and observations of a rollout, in order."""

    def __init__(self, origin: Origin, followed: Followed = UNFOLLOWED) -> None:
        self.origin = origin
        self._followed = followed
        self._items: list[Line | Observed] = []
        # Indices of the lines among the items.
        self._at: list[int] = []

    @property
    def line_count(self) -> int:
        return len(self._at)

    @property
    def last(self) -> Line | None:
        """The newest line, or None if no line exists or an observation followed it."""
        newest = self._items[-1] if self._items else None
        return newest if isinstance(newest, Line) else None

    @property
    def executions(self) -> Iterator[Execution]:
        """Executions of lines so far, in order."""
        lines = (item for item in self._items if isinstance(item, Line))
        return (line.execution for line in lines if line.execution is not None)

    def sampled(self, line: Line) -> bool:
        """Append a line of the policy. Return True if the client that follows it wants no more."""
        self._at.append(len(self._items))
        self._items.append(line)
        self._followed.heard(line)
        return self._followed.wanted(line.text) != line.text

    def observed(self, observed: Observed) -> None:
        """Append an observation.

        Raises:
            ConfigError: it does not follow a closed line, or our console failed on that line.
        """
        if self.last is None:
            raise ConfigError("episode.observe()", observed.text[:40], "an observation follows a sampled line")
        if self.last.end is LineEnd.LENGTH:
            raise ConfigError("episode.observe()", observed.text[:40], "a cut line ends the rollout; check its `ended`")
        run = self.last.execution
        if run is not None and run.status is LineStatus.SANDBOX_FAULT:
            raise ConfigError("episode.observe()", observed.text[:40], "our console failed; let SandboxFault pass")
        self._items.append(observed)
        self._followed.heard(observed)

    def executed(self, execution: Execution) -> None:
        """Record an execution of the newest line. Earlier executions of that line are kept, and come first.

        Raises:
            ConfigError: no line was sampled.
        """
        at, line = self._find(-1, "episode.execute()")
        # A sampler may execute one line in several parts.
        before = line.execution or execution
        if before is not execution:
            ran, calls = (*before.ran, *execution.ran), (*before.calls, *execution.calls)
            execution = replace(execution, ran=ran, calls=calls)
        self._items[at] = line = replace(line, execution=execution)
        self._followed.heard(line)

    def reward(self, value: float, name: str, number: int) -> None:
        """Add a reward to a line, which is given by its index as in a list.

        Raises:
            ConfigError: no such line exists, or `value` is not finite.
        """
        if not math.isfinite(value):
            raise ConfigError(f"episode.reward(name={name!r})", value, "give a finite number")
        at, line = self._find(number, "episode.reward()")
        self._items[at] = replace(line, rewards=(*line.rewards, NamedReward(name, float(value))))

    def trajectory(self, stop: Stop, wall_s: float, failure: Failure | None, seen: Sequence[int] | None) -> Trajectory:
        """Return the record so far, frozen. `seen` are all ids that the engine saw or sampled; None skips the
        comparison.

        Raises:
            InvariantError: the ids that the engine saw are not a prefix of the record (invariant I5).
        """
        origin = self.origin
        record = Trajectory(
            id=origin.id,
            task_id=origin.task.id,
            prompt=origin.prompt,
            segments=tuple(self._segments()),
            stop=stop,
            policy_step=origin.policy_step,
            seed=origin.seed,
            wall_s=wall_s,
            failure=failure,
            workspace=origin.task.workspace,
        )
        if seen is not None:
            _check_prefix(seen, (*origin.prompt.token_ids, *record.completion_ids), origin.id)
        return record

    def _segments(self) -> Iterator[Segment]:
        """Yield runs of lines as sampled segments, and observations unchanged."""
        for is_line, items in groupby(self._items, lambda item: isinstance(item, Line)):
            if is_line:
                yield Sampled(tuple(item for item in items if isinstance(item, Line)))
            else:
                yield from (item for item in items if isinstance(item, Observed))

    def _find(self, number: int, asked_by: str) -> tuple[int, Line]:
        try:
            at = self._at[number]
        except IndexError:
            remedy = f"{len(self._at)} lines were sampled; sample a line first"
            raise ConfigError(f"{asked_by}, line", number, remedy) from None
        line = self._items[at]
        assert isinstance(line, Line)
        return at, line


def _check_prefix(seen: Sequence[int], record: Sequence[int], id: str) -> None:
    # Both sides only append ids, so equality at the end implies that every request was a prefix.
    if tuple(seen) != tuple(record[: len(seen)]):
        at = next((i for i, (a, b) in enumerate(zip(seen, record, strict=False)) if a != b), len(record))
        raise InvariantError(f"trajectory {id}: the engine's ids differ from the record at position {at} (I5)")

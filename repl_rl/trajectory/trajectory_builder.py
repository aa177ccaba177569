"""Construction of a trajectory: a recorder of lines and observations, in order. It only grows.

The recorder is pure: it uses no engine, no console and no event loop. Segments are derived from the record, so a
sampler cannot mix up sampled and observed tokens.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from repl_rl.errors import ConfigError, InvariantError
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import (
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


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Start of a rollout, and the identity of its record."""

    id: str
    task: Task
    prompt: Prompt
    seed: int
    policy_step: int
    """Optimizer steps behind the policy that the rollout is for. Each line names the one that wrote it."""


def derive_seed(name: str) -> int:
    """Return the seed (31 bits) of the rollout with that name, which is the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") >> 1


OnItem = Callable[[Line | Observed], None]
"""Callback for each line when it is sampled, and again when it is executed, and for each observation."""


@dataclass(frozen=True, slots=True)
class RolloutObserver:
    """Requests of a client that follows a rollout, in addition to its limits."""

    on_item: OnItem = lambda item: None
    max_tokens: int | None = None
    """Largest number of ids to sample (>= 1). None leaves it to the limits."""
    stop_texts: tuple[str, ...] = ()
    """Non-empty texts that end the rollout. The line in which one is written is the last, and does not run."""

    def trim_at_stop(self, text: str) -> str:
        """Return the part of a line before the first of the texts that end the rollout."""
        return text[: min((at for stop in self.stop_texts if (at := text.find(stop)) >= 0), default=len(text))]


UNFOLLOWED = RolloutObserver()
"""Requests of a rollout that no client follows."""


class EpisodeRecorder:
    """Lines and observations of a rollout, in order."""

    def __init__(self, origin: RolloutSpec, followed: RolloutObserver = UNFOLLOWED) -> None:
        self.spec = origin
        self._followed = followed
        self._items: list[Line | Observed] = []
        # Index of each line among the items.
        self._at: list[int] = []

    @property
    def line_count(self) -> int:
        return len(self._at)

    @property
    def last_line(self) -> Line | None:
        """The newest line, or None if no line exists or an observation followed it."""
        newest = self._items[-1] if self._items else None
        return newest if isinstance(newest, Line) else None

    @property
    def executions(self) -> Iterator[Execution]:
        """Executions of lines so far, in order."""
        lines = (item for item in self._items if isinstance(item, Line))
        return (line.execution for line in lines if line.execution is not None)

    def append_line(self, line: Line) -> bool:
        """Append a line of the policy. Return True if it contains a stop text of the client that follows the
        rollout."""
        self._at.append(len(self._items))
        self._items.append(line)
        self._followed.on_item(line)
        return self._followed.trim_at_stop(line.text) != line.text

    def append_observation(self, observed: Observed) -> None:
        """Append an observation.

        Raises:
            ConfigError: it does not follow a closed line, or our console failed on that line.
        """
        # Only a closed line, which did not fail on our side, can have printed something.
        if self.last_line is None:
            raise ConfigError("episode.observe()", observed.text[:40], "an observation follows a sampled line")
        if self.last_line.end is LineEnd.LENGTH:
            raise ConfigError("episode.observe()", observed.text[:40], "a cut line ends the rollout; check its `ended`")
        run = self.last_line.execution
        if run is not None and run.status is LineStatus.SANDBOX_FAULT:
            raise ConfigError("episode.observe()", observed.text[:40], "our console failed; let SandboxFault pass")
        self._items.append(observed)
        self._followed.on_item(observed)

    def record_execution(self, execution: Execution) -> None:
        """Record an execution of the newest line. Earlier executions of that line are kept, and come first.

        Raises:
            ConfigError: no line was sampled.
        """
        at, line = self._find_line(-1, "episode.execute()")
        # A sampler may execute one line in several parts.
        before = line.execution or execution
        if before is not execution:
            ran, calls = (*before.ran, *execution.ran), (*before.calls, *execution.calls)
            execution = replace(execution, ran=ran, calls=calls)
        self._items[at] = line = replace(line, execution=execution)
        self._followed.on_item(line)

    def add_reward(self, value: float, name: str, number: int) -> None:
        """Add a reward to a line, which is given by its index as in a list.

        Raises:
            ConfigError: no such line exists, or `value` is not finite.
        """
        if not math.isfinite(value):
            raise ConfigError(f"episode.reward(name={name!r})", value, "give a finite number")
        # Lines are frozen: replace the line by one with the additional reward.
        at, line = self._find_line(number, "episode.reward()")
        self._items[at] = replace(line, rewards=(*line.rewards, NamedReward(name, float(value))))

    def build_trajectory(
        self, stop: Stop, wall_s: float, failure: Failure | None, seen: Sequence[int] | None
    ) -> Trajectory:
        """Return the record so far, frozen. `seen` are all ids that the engine saw or sampled; None skips the
        comparison.

        Raises:
            InvariantError: the ids that the engine saw are not a prefix of the record (invariant I5).
        """
        origin = self.spec
        # The trajectory checks its invariants itself.
        record = Trajectory(
            id=origin.id,
            task_id=origin.task.id,
            prompt=origin.prompt,
            segments=tuple(self._iterate_segments()),
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

    def _iterate_segments(self) -> Iterator[Segment]:
        """Yield runs of lines as sampled segments, and observations unchanged."""
        for is_line, items in groupby(self._items, lambda item: isinstance(item, Line)):
            if is_line:
                yield Sampled(tuple(item for item in items if isinstance(item, Line)))
            else:
                yield from (item for item in items if isinstance(item, Observed))

    def _find_line(self, number: int, asked_by: str) -> tuple[int, Line]:
        """Return the index of a line among the items, and the line. `asked_by` names the call in error messages."""
        try:
            at = self._at[number]
        except IndexError:
            remedy = f"{len(self._at)} lines were sampled; sample a line first"
            raise ConfigError(f"{asked_by}, line", number, remedy) from None
        line = self._items[at]
        assert isinstance(line, Line)
        return at, line


def _check_prefix(seen: Sequence[int], record: Sequence[int], id: str) -> None:
    """Refuse ids of the engine that are not a prefix of the record."""
    # Both sides only append ids, so equality at the end implies that every request was a prefix.
    if tuple(seen) != tuple(record[: len(seen)]):
        at = next((i for i, (a, b) in enumerate(zip(seen, record, strict=False)) if a != b), len(record))
        raise InvariantError(f"trajectory {id}: the engine's ids differ from the record at position {at} (I5)")

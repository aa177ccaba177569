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
    """Number of optimizer steps applied to the policy that is trained on the rollout, or evaluated with it."""


def derive_seed(name: str) -> int:
    """Return the seed (31 bits) of the rollout with that name, which is the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") >> 1


OnItem = Callable[[Line | Observed], None]
"""Callback for each line when it is sampled, and again when it is executed, and for each observation."""


@dataclass(frozen=True, slots=True)
class RolloutObserver:
    """Callback, token limit and stop texts of a client that streams a rollout, in addition to its limits."""

    on_item: OnItem = lambda item: None
    max_tokens: int | None = None
    """Largest number of ids to sample (>= 1). None leaves it to the limits."""
    stop_texts: tuple[str, ...] = ()
    """Non-empty texts that end the rollout. The line in which one is written is the last, and does not run."""

    def trim_at_stop(self, text: str) -> str:
        """Return the part of a line before the first of the texts that end the rollout."""
        return text[
            : min((position for stop in self.stop_texts if (position := text.find(stop)) >= 0), default=len(text))
        ]


UNFOLLOWED = RolloutObserver()
"""Observer of a rollout that no client streams: no callback and no additional limits."""


class EpisodeRecorder:
    """Lines and observations of a rollout, in order."""

    def __init__(self, spec: RolloutSpec, observer: RolloutObserver = UNFOLLOWED) -> None:
        self.spec = spec
        self._observer = observer
        self._items: list[Line | Observed] = []
        # Index of each line among the items.
        self._line_indices: list[int] = []

    @property
    def line_count(self) -> int:
        return len(self._line_indices)

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
        self._line_indices.append(len(self._items))
        self._items.append(line)
        self._observer.on_item(line)
        return self._observer.trim_at_stop(line.text) != line.text

    def append_observation(self, observation: Observed) -> None:
        """Append an observation.

        Raises:
            ConfigError: it does not follow a closed line, or our console failed on that line.
        """
        # Only a closed line, which did not fail on our side, can have printed something.
        if self.last_line is None:
            raise ConfigError("episode.observe()", observation.text[:40], "an observation follows a sampled line")
        if self.last_line.end is LineEnd.LENGTH:
            raise ConfigError(
                "episode.observe()", observation.text[:40], "a cut line has ended the rollout; check `episode.ended`"
            )
        execution = self.last_line.execution
        if execution is not None and execution.status is LineStatus.SANDBOX_FAULT:
            raise ConfigError("episode.observe()", observation.text[:40], "the console failed; re-raise SandboxFault")
        self._items.append(observation)
        self._observer.on_item(observation)

    def record_execution(self, execution: Execution) -> None:
        """Record an execution of the newest line. Earlier executions of that line are kept, and come first.

        Raises:
            ConfigError: no line was sampled.
        """
        index, line = self._find_line(-1, "episode.execute()")
        # A sampler may execute one line in several parts.
        earlier = line.execution or execution
        if earlier is not execution:
            ran, calls = (*earlier.ran, *execution.ran), (*earlier.calls, *execution.calls)
            execution = replace(execution, ran=ran, calls=calls)
        self._items[index] = line = replace(line, execution=execution)
        self._observer.on_item(line)

    def add_reward(self, value: float, name: str, number: int) -> None:
        """Add a reward to a line, which is given by its index as in a list.

        Raises:
            ConfigError: no such line exists, or `value` is not finite.
        """
        if not math.isfinite(value):
            raise ConfigError(f"episode.reward(name={name!r})", value, "give a finite number")
        # Lines are frozen: replace the line by one with the additional reward.
        index, line = self._find_line(number, "episode.reward()")
        self._items[index] = replace(line, rewards=(*line.rewards, NamedReward(name, float(value))))

    def build_trajectory(
        self, stop: Stop, wall_s: float, failure: Failure | None, seen_ids: Sequence[int] | None
    ) -> Trajectory:
        """Return the record so far, frozen. `seen_ids` are all ids that the engine saw or sampled; None skips the
        comparison.

        Raises:
            InvariantError: the ids that the engine saw are not a prefix of the record (invariant I5).
        """
        spec = self.spec
        # The trajectory checks its invariants itself.
        record = Trajectory(
            id=spec.id,
            task_id=spec.task.id,
            prompt=spec.prompt,
            segments=tuple(self._iterate_segments()),
            stop=stop,
            policy_step=spec.policy_step,
            seed=spec.seed,
            wall_s=wall_s,
            failure=failure,
            workspace=spec.task.workspace,
        )
        if seen_ids is not None:
            _check_prefix(seen_ids, (*spec.prompt.token_ids, *record.completion_ids), spec.id)
        return record

    def _iterate_segments(self) -> Iterator[Segment]:
        """Yield runs of lines as sampled segments, and observations unchanged."""
        for is_line, items in groupby(self._items, lambda item: isinstance(item, Line)):
            if is_line:
                yield Sampled(tuple(item for item in items if isinstance(item, Line)))
            else:
                yield from (item for item in items if isinstance(item, Observed))

    def _find_line(self, number: int, method: str) -> tuple[int, Line]:
        """Return the index of a line among the items, and the line. `method` names the call in error messages."""
        try:
            index = self._line_indices[number]
        except IndexError:
            remedy = f"{len(self._line_indices)} lines were sampled; sample a line first"
            raise ConfigError(f"{method}, line", number, remedy) from None
        line = self._items[index]
        assert isinstance(line, Line)
        return index, line


def _check_prefix(seen_ids: Sequence[int], record: Sequence[int], id: str) -> None:
    """Refuse ids of the engine that are not a prefix of the record."""
    # Both sides only append ids, so equality at the end implies that every request was a prefix.
    if tuple(seen_ids) != tuple(record[: len(seen_ids)]):
        position = next((i for i, (a, b) in enumerate(zip(seen_ids, record, strict=False)) if a != b), len(record))
        raise InvariantError(f"trajectory {id}: the engine's ids differ from the record at position {position} (I5)")

"""From a trajectory to one reward a line, in reward units (dimensionless).

A line's reward is what its `LineStatus` is worth in a `RewardTable`, plus what the sampler gave it by name, plus what a
user's function says. The outcome reward is not part of it: it belongs to the whole rollout and is `Trajectory.outcome`.
"""

import ast
import hashlib
import importlib
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.trajectory import LineStatus, Trajectory


@dataclass(frozen=True, slots=True)
class RewardTable:
    """What a line earns for each `LineStatus`; reward units, finite. `sandbox_fault` is ours and has no entry."""

    syntax_error: float = -0.1
    """The cell did not compile."""
    exception: float = -0.1
    """The cell raised."""
    timeout: float = -0.1
    """The cell ran past its time limit."""
    memory_limit: float = -0.1
    """The cell asked for more memory than it may have."""
    output_limit: float = -0.1
    """The cell printed more than it may."""
    killed: float = -0.1
    """The cell killed its console."""
    exited: float = 0.0
    """The cell called `exit()`."""
    incomplete: float = 0.0
    """The line is the beginning of a longer cell."""
    ok: float = 0.0
    """The cell ran."""
    answered: float = 0.0
    """The cell submitted an answer; whether it is right is the outcome's business."""
    gated: bool = False
    """True: rewards above 0, whoever gave them, count only in a rollout whose outcome is at least 1."""
    bound: float = 0.5
    """Largest sum of absolute line rewards that one rollout can have, > 0. Above it, all of them shrink alike."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value):
                raise ConfigError(f"rewards.{field.name}", value, "a reward is a finite number")
        if self.bound <= 0:
            raise ConfigError("rewards.bound", self.bound, "the bound of a rollout's line rewards is above 0")

    def of(self, status: LineStatus) -> float:
        """The reward of one line with this status; 0 for `sandbox_fault`."""
        if status is LineStatus.SANDBOX_FAULT:
            return 0.0
        return float(getattr(self, status.value))


NO_SHAPING = RewardTable(syntax_error=0, exception=0, timeout=0, memory_limit=0, output_limit=0, killed=0)
"""Every line is worth nothing: only the outcome counts."""


LineReward = Callable[[Trajectory], Sequence[float]]
"""A user's function: one finite reward a line of the trajectory, in reward units."""

TIME_LIMIT_S = 10.0
"""Longest that a `LineReward` may take for one trajectory, wall clock."""


def line_rewards(trajectory: Trajectory, table: RewardTable, extra: LineReward | None = None) -> tuple[float, ...]:
    """One reward a line, shape (L,): the table's entry, plus the sampler's rewards for that line, plus `extra`'s.

    The sum of their absolute values is at most `table.bound`: if it would be more, all are scaled by one factor,
    so which line earned more stays visible. A rollout that failed on our side earns nothing.

    Raises:
        UserCodeError: `extra` raised, took too long, or gave other than one finite number a line.
    """
    if not trajectory.trainable:
        return (0.0,) * len(trajectory.lines)
    more_L = held_to_contract(extra, trajectory) if extra else (0.0,) * len(trajectory.lines)
    rewards_L = [
        (table.of(line.execution.status) if line.execution is not None else 0.0)
        + math.fsum(reward.value for reward in line.rewards)
        + more
        for line, more in zip(trajectory.lines, more_L, strict=True)
    ]
    if table.gated and (trajectory.outcome or 0.0) < 1.0:
        rewards_L = [min(reward, 0.0) for reward in rewards_L]
    total = math.fsum(abs(reward) for reward in rewards_L)
    scale = table.bound / total if total > table.bound else 1.0
    return tuple(reward * scale for reward in rewards_L)


def line_reward(name: str) -> LineReward:
    """The function at `module:function`.

    Raises:
        ConfigError: there is no such function.
    """
    module_name, _, attribute = name.partition(":")
    try:
        function: LineReward = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError("line_reward", name, f"give module:function; it cannot be imported: {error}") from error
    return function


def held_to_contract(
    function: LineReward, trajectory: Trajectory, time_limit_s: float = TIME_LIMIT_S
) -> tuple[float, ...]:
    """Call a user's reward function; see `line_rewards` for what it raises.

    It runs in a thread of its own, which is abandoned when it takes too long: the run ends then.
    """
    name = f"line reward {getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', function)}"
    got: list[tuple[float, ...]] = []
    raised: list[BaseException] = []

    def call() -> None:
        try:
            got.append(tuple(float(value) for value in function(trajectory)))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(time_limit_s)
    if raised:
        raise UserCodeError(f"{name} raised {type(raised[0]).__name__}: {raised[0]}") from raised[0]
    if not got:
        raise UserCodeError(f"{name} took longer than {time_limit_s:g} s for one trajectory; make it faster")
    if len(got[0]) != len(trajectory.lines):
        raise UserCodeError(f"{name} gave {len(got[0])} rewards for {len(trajectory.lines)} lines; give one per line")
    for value in got[0]:
        if not math.isfinite(value):
            raise UserCodeError(f"{name} gave {value!r}; a reward is a finite number")
    return got[0]


def line_states(trajectory: Trajectory) -> tuple[str, ...]:
    """A name of the console state that each line starts from, shape (L,); equal names mean equal states.

    It is made on the host from the cells that ran before, without their layout and comments; cells that never compiled
    left no trace. So it tells more states apart than there are (`x = 4` and `x = 2 + 2` differ), never fewer, as
    long as programs are deterministic.
    """
    states: list[str] = []
    ran = ""
    open_cell = ""
    for line in trajectory.lines:
        states.append(hashlib.blake2b((ran + open_cell).encode(errors="replace"), digest_size=16).hexdigest())
        if line.execution is None:
            continue
        open_cell += line.text
        if line.execution.status is not LineStatus.INCOMPLETE:
            if line.execution.status is not LineStatus.SYNTAX_ERROR:
                ran += _canonical(open_cell)
            open_cell = ""
    return tuple(states)


def _canonical(cell: str) -> str:
    """The cell without layout and comments; the cell itself where Python here cannot parse it."""
    try:
        body = ast.parse(cell).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return f"{cell!r}\n"
    return "".join(ast.dump(statement) + "\n" for statement in body)

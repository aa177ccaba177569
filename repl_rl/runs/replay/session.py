"""Replay session: a stored trajectory in a fresh console, run line by line, with lines of the user in between."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from repl_rl.errors import ConfigError
from repl_rl.record.console import LineBuffer, prompt
from repl_rl.record.trajectory import LineEnd, Trajectory
from repl_rl.rollout.blocks import as_block
from repl_rl.rollout.console import offered
from repl_rl.rollout.host_record import Recall
from repl_rl.runs.replay.compare import Cause, Difference, Shown, cause, held, is_shown_as_comments, same
from repl_rl.runs.store import Transition, transitions
from repl_rl.sandbox.base import PushResult, Sandbox, SandboxSession, console_of
from repl_rl.sandbox.lines import combined, push_each, push_lines

STATE_LINE = (
    "print(__import__('hashlib').sha256(__import__('re').sub(r' at 0x[0-9a-f]+', '', repr(sorted(("
    "n, type(v).__qualname__, repr(sorted(v, key=repr) if isinstance(v, (set, frozenset)) else v), "
    "repr(vars(v)) if type(v).__repr__ is object.__repr__ and hasattr(v, '__dict__') else '', "
    "repr([getattr(getattr(v, '__code__', 0), k, 0) for k in ('co_code', 'co_consts', 'co_names')])) "
    "for n, v in globals().items() if not n.startswith('__')))).encode('utf-8', 'replace')).hexdigest())"
)
"""Line that `Replay.state` runs in the console: it prints a digest and binds no name."""


@dataclass(frozen=True, slots=True)
class Step:
    """Line that ran in the rebuilt console."""

    text: str
    """Text as the policy wrote it, or as it was typed, with its newline."""
    result: PushResult
    shown: Shown
    """Output and next prompt, as an observation would hold them."""
    line: int | None
    """Number of the recorded line that it runs or replaces, from 0; None means that it was typed in addition."""
    ran: tuple[str, ...]
    """Physical lines that the console received."""
    recorded: Transition | None
    """Recorded line and observation to compare with; None means that the line was typed."""
    difference: Difference | None = None
    """Difference from `recorded`; None means that they agree."""


class Replay:
    """Trajectory, and a console in which its first `position` lines have run. See `open_replay`.

    Calls of host functions are answered from the record. A call that is not recorded is refused with a `HostError`.
    """

    def __init__(self, trajectory: Trajectory, console: SandboxSession, recall: Recall) -> None:
        """Start at line 0. `recall` answers the console's calls of host functions."""
        self.trajectory = trajectory
        self._recall = recall
        self.position = 0
        """Number of the next recorded line, from 0."""
        self.steps: list[Step] = []
        """Steps that have run."""
        self._transitions = transitions(trajectory)
        self._console = console
        self._buffer = LineBuffer()
        self._more = False

    @property
    def ended(self) -> bool:
        """True if the console takes no further line, or all recorded lines have run."""
        return self._console.ended or self.position >= len(self._transitions)

    @property
    def prompt(self) -> str:
        """Prompt that the console shows now."""
        return prompt(self._more)

    @property
    def edited(self) -> bool:
        """True if a line was typed, so that the state may differ from the recorded one."""
        return any(step.recorded is None for step in self.steps)

    async def step(self) -> Step | None:
        """Run the next recorded line. Return None and skip it if no console ran anything for it.

        Raises:
            ConfigError: no line is left, or the console has ended.
        """
        if self.position >= len(self._transitions):
            raise ConfigError("replay.step()", self.position, f"the trajectory has {len(self._transitions)} lines")
        recorded = self._transitions[self.position]
        run = recorded.line.execution
        if run is None or not run.ran:
            self.position += 1
            return None
        if recorded.typed:
            self._buffer.feed(recorded.line.text + "\n" * (recorded.line.end is LineEnd.EOS))
        step = await self._run(recorded.line.text, run.ran, self.position, recorded)
        self.position += 1
        return step

    async def to_line(self, lines: int) -> None:
        """Run recorded lines up to the first `lines` of them.

        Raises:
            ConfigError: `lines` is below `position` or above the number of lines, or the console ends before.
        """
        if not self.position <= lines <= len(self._transitions):
            remedy = f"give {self.position} to {len(self._transitions)}; to go back, open a fresh replay"
            raise ConfigError("line to replay to", lines, remedy)
        while self.position < lines:
            await self.step()

    async def edit(self, text: str) -> Step:
        """Run a line of the user in place of the next recorded one."""
        step = await self._type(text, self.position)
        self.position += 1
        return step

    async def type(self, text: str) -> Step:
        """Run a line of the user; the next recorded line remains the next."""
        return await self._type(text, None)

    async def state(self) -> str:
        """Return a digest of the console's names, with type and `repr` of each value: 64 hexadecimal digits.

        Addresses are left out. Functions count with their code, objects with the default `repr` with their attributes,
        sets in sorted order. Equal states have equal digests. Different states have different digests as far as `repr`
        shows the difference. The console computes it, so a program that replaced `print` or `repr` can fake it.

        Raises:
            ConfigError: the console has ended, or waits for the rest of a cell.
        """
        if self._more:
            raise ConfigError("console", "within a cell", "finish the cell first")
        return (await push_lines(self._open(), [STATE_LINE])).text.strip()

    async def _type(self, text: str, line: int | None) -> Step:
        closed = text if text.endswith("\n") else f"{text}\n"
        return await self._run(closed, self._buffer.feed(closed), line, None)

    async def _run(self, text: str, lines: tuple[str, ...], line: int | None, recorded: Transition | None) -> Step:
        run = recorded.line.execution if recorded is not None else None
        self._recall.expect(run.calls if run is not None else ())
        results = await push_each(self._open(), lines)
        result = combined(results)
        self._more = result.more
        # No prompt follows an end token, because the policy reads nothing more.
        over = recorded is not None and recorded.line.end is LineEnd.EOS and not recorded.asked
        asked = "" if self._console.ended or over else prompt(result.more)
        shown = Shown(result.text + asked, result.status, result.cut)
        step = Step(text, result, shown, line, lines[: len(results)], recorded)
        if recorded is not None:
            step = replace(step, difference=self._compared(recorded, step))
        self.steps.append(step)
        return step

    def _compared(self, recorded: Transition, step: Step) -> Difference | None:
        run, observed = recorded.line.execution, recorded.observed
        assert run is not None
        before = Shown(observed.text if observed else "", run.status, observed is not None and observed.cut)
        last = self.position + 1 == len(self._transitions)
        # The comparison depends on what the sampler put into the record: only a status, console text, or its own text.
        if observed is None and not recorded.typed:
            agrees = run.status in (step.result.status, as_block(step.result).status)
        elif recorded.typed and (recorded.asked or last or observed is None):
            agrees = same(before, step.shown) or is_shown_as_comments(before, step.result)
        else:
            agrees = held(before, step.result) or held(before, as_block(step.result))
        if agrees and not self._recall.differs:
            return None
        # A known cause wins over the guess: changed calls, and above all a typed line.
        sources = [each.text for each in (*self.steps, step)]
        why = Cause.HOST if self._recall.differs else cause(sources, before, step.shown, None)
        why = Cause.EDIT if self.edited else why
        return Difference(self.position, before, step.shown, why)

    def _open(self) -> SandboxSession:
        if self._console.ended:
            raise ConfigError("console", "ended", "open a fresh replay; see `ended`")
        return self._console


@asynccontextmanager
async def open_replay(trajectory: Trajectory, sandbox: Sandbox, to_line: int = 0) -> AsyncIterator[Replay]:
    """Open a fresh console with the workspace of `trajectory`, and run the first `to_line` lines of it.

    Raises:
        SetupError, StoreError: the workspace cannot be made here, or is not stored.
        ConfigError: the trajectory cannot be typed into a console, or has no such line; or its lines could call host
            functions, which the sandbox does not support.
        SandboxFault: no console could be started.
    """
    check(trajectory)
    async with console_of(sandbox, trajectory.workspace) as console:
        recall = Recall(dict.fromkeys(trajectory.host_functions, "known from a record alone"))
        if trajectory.host_functions:
            offered(console, recall, sandbox.name)
        replay = Replay(trajectory, console, recall)
        await replay.to_line(to_line)
        yield replay


def check(trajectory: Trajectory) -> None:
    """Raise ConfigError for a trajectory that cannot be replayed.

    Its lines were run by a tool instead of a console, or its old record lacks the console's input.

    Raises:
        ConfigError: for some executed line the console's input is unknown.
    """
    runs = list(trajectory.executions)
    # An answer that was written as text was not executed.
    unknown = [run for run in runs if not run.ran and run.answer is None]
    if unknown:
        text = next(line.text for line in trajectory.lines if line.execution is not None and not line.execution.ran)
        remedy = "its record does not say what a console was given; it can be shown, but not executed again"
        raise ConfigError(f"trajectory {trajectory.id}, a line that was executed", text[:40], remedy)
    # An old record of an answer in a console looks the same.
    if runs and not any(run.ran for run in runs):
        remedy = "its record has no input of a console; it can be shown, but not executed again"
        raise ConfigError(f"trajectory {trajectory.id}", "an answer in its text", remedy)

"""A stored trajectory in a fresh console: run its lines again, stop anywhere, go on by hand."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from repl_rl.errors import ConfigError
from repl_rl.record.console import LineBuffer, prompt
from repl_rl.record.trajectory import LineEnd, Trajectory
from repl_rl.rollout.blocks import as_block
from repl_rl.rollout.console import offered
from repl_rl.rollout.host_record import Recall
from repl_rl.runs.replay.compare import Cause, Difference, Shown, cause, held, same
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
"""What `Replay.state` has the console run: it prints a digest and binds nothing."""


@dataclass(frozen=True, slots=True)
class Step:
    """A line that ran in the rebuilt console."""

    text: str
    """As the policy wrote it, or as it was typed; with its newline."""
    result: PushResult
    shown: Shown
    """What would be spliced in: output and next prompt."""
    line: int | None
    """Number of the recorded line that it stands for, from 0; None: it was typed in addition."""
    ran: tuple[str, ...]
    """The physical lines that the console was given."""
    recorded: Transition | None
    """What it is compared with; None: it was typed."""
    difference: Difference | None = None
    """How it differs from `recorded`; None: it does not."""


class Replay:
    """A trajectory and a console in which the first `position` of its lines have run. See `open_replay`.

    Calls of host functions are answered from the record; a call that it does not have is refused with a `HostError`.
    """

    def __init__(self, trajectory: Trajectory, console: SandboxSession, recall: Recall) -> None:
        """`recall` is what the console was offered as its host."""
        self.trajectory = trajectory
        self._recall = recall
        self.position = 0
        """The recorded line that is next, from 0."""
        self.steps: list[Step] = []
        """What ran so far."""
        self._transitions = transitions(trajectory)
        self._console = console
        self._buffer = LineBuffer()
        self._more = False

    @property
    def ended(self) -> bool:
        """True once the console takes no further line, or all recorded lines have run."""
        return self._console.ended or self.position >= len(self._transitions)

    @property
    def prompt(self) -> str:
        """What the console asks with now."""
        return prompt(self._more)

    @property
    def edited(self) -> bool:
        """True once something was typed: the state is no longer the recorded one."""
        return any(step.recorded is None for step in self.steps)

    async def step(self) -> Step | None:
        """Run what was run for the next recorded line. None: no console ran anything for it, so it is passed over.

        Raises:
            ConfigError: there is no next line, or the console has ended.
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
        """Run recorded lines until `lines` of them are behind.

        Raises:
            ConfigError: `lines` is behind already or more than there are, or the console ends before.
        """
        if not self.position <= lines <= len(self._transitions):
            remedy = f"give {self.position} to {len(self._transitions)}; to go back, open a fresh replay"
            raise ConfigError("line to replay to", lines, remedy)
        while self.position < lines:
            await self.step()

    async def edit(self, text: str) -> Step:
        """Run one line of yours in the place of the next recorded one."""
        step = await self._type(text, self.position)
        self.position += 1
        return step

    async def type(self, text: str) -> Step:
        """Run one line of yours; the next recorded line stays the next."""
        return await self._type(text, None)

    async def state(self) -> str:
        """A digest of the console's names, with type and `repr` of each value: 64 hexadecimal digits.

        Addresses are left out. Functions count with their code, objects without a `repr` of their own with their
        attributes, sets in sorted order. Equal states have equal digests, and different ones others as far as `repr`
        tells. The console computes it by itself, so a program that replaced `print` or `repr` can lie.

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
        # After an end token nothing is asked: no policy would read it.
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
        if observed is None and not recorded.typed:
            agrees = run.status in (step.result.status, as_block(step.result).status)
        elif recorded.typed and (recorded.asked or last or observed is None):
            agrees = same(before, step.shown)
        else:
            agrees = held(before, step.result) or held(before, as_block(step.result))
        if agrees and not self._recall.differs:
            return None
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
    """A fresh console with the workspace of `trajectory`, in which the first `to_line` of its lines have run.

    Raises:
        SetupError, StoreError: the workspace cannot be made here, or is not stored.
        ConfigError: the trajectory cannot be typed into a console, or there is no such line; or lines could call host
            functions, and the sandbox has no way to.
        SandboxFault: no console could be had.
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
    """Refuse what no console ran: a tool did, or a record of an older version does not say what ran.

    Raises:
        ConfigError: of some line that was executed it is not known what a console was given.
    """
    runs = list(trajectory.executions)
    # An answer that was written in text ran nowhere.
    unknown = [run for run in runs if not run.ran and run.answer is None]
    if unknown or (runs and not any(run.ran for run in runs)):
        text = next(line.text for line in trajectory.lines if line.execution is not None and not line.execution.ran)
        remedy = "its record does not say what a console was given; it can be shown, but not executed again"
        raise ConfigError(f"trajectory {trajectory.id}, a line that was executed", text[:40], remedy)

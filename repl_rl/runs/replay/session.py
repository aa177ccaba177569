"""A stored trajectory in a fresh console: run its lines again, stop anywhere, go on by hand."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from repl_rl.errors import ConfigError
from repl_rl.record.console import LineBuffer, prompt
from repl_rl.record.trajectory import Trajectory
from repl_rl.runs.replay.compare import Cause, Difference, Shown, cause, same
from repl_rl.runs.store import Exchange, exchanges
from repl_rl.sandbox.base import PushResult, Sandbox, SandboxSession
from repl_rl.sandbox.lines import push_lines

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
    recorded: Exchange | None
    """What it is compared with; None: it was typed."""
    difference: Difference | None = None
    """None: it shows what was recorded, or there is nothing to compare with."""


class Replay:
    """A trajectory and a console in which the first `position` of its lines have run. See `open_replay`."""

    def __init__(self, trajectory: Trajectory, console: SandboxSession) -> None:
        self.trajectory = trajectory
        self.position = 0
        """The recorded line that is next, from 0."""
        self.steps: list[Step] = []
        """What ran so far."""
        self._exchanges = exchanges(trajectory)
        self._console = console
        self._buffer = LineBuffer()
        self._more = False

    @property
    def ended(self) -> bool:
        """True once the console takes no further line, or all recorded lines have run."""
        return self._console.ended or self.position >= len(self._exchanges)

    @property
    def prompt(self) -> str:
        """What the console asks with now."""
        return prompt(self._more)

    @property
    def edited(self) -> bool:
        """True once something was typed: the state is no longer the recorded one."""
        return any(step.recorded is None for step in self.steps)

    async def step(self) -> Step | None:
        """Run the next recorded line. None: the console was never asked to run it, so it is passed over.

        Raises:
            ConfigError: there is no next line, or the console has ended.
        """
        if self.position >= len(self._exchanges):
            raise ConfigError("replay.step()", self.position, f"the trajectory has {len(self._exchanges)} lines")
        exchange = self._exchanges[self.position]
        if exchange.line.execution is None:
            self.position += 1
            return None
        step = await self._run(exchange.line.text, self.position, exchange)
        self.position += 1
        return step

    async def to_line(self, lines: int) -> None:
        """Run recorded lines until `lines` of them are behind.

        Raises:
            ConfigError: `lines` is behind already or more than there are, or the console ends before.
        """
        if not self.position <= lines <= len(self._exchanges):
            remedy = f"give {self.position} to {len(self._exchanges)}; to go back, open a fresh replay"
            raise ConfigError("line to replay to", lines, remedy)
        while self.position < lines:
            await self.step()

    async def edit(self, text: str) -> Step:
        """Run one line of yours in the place of the next recorded one."""
        step = await self._run(_closed(text), self.position, None)
        self.position += 1
        return step

    async def type(self, text: str) -> Step:
        """Run one line of yours; the next recorded line stays the next."""
        return await self._run(_closed(text), None, None)

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

    async def _run(self, text: str, line: int | None, recorded: Exchange | None) -> Step:
        result = await push_lines(self._open(), self._buffer.feed(text))
        self._more = result.more
        shown = Shown(result.text + ("" if self._console.ended else prompt(result.more)), result.status)
        difference = self._compared(recorded, shown) if recorded and line is not None else None
        step = Step(text, result, shown, line, recorded, difference)
        self.steps.append(step)
        return step

    def _compared(self, recorded: Exchange, now: Shown) -> Difference | None:
        assert recorded.line.execution is not None
        before = Shown(recorded.observed or "", recorded.line.execution.status)
        if same(before, now):
            return None
        sources = [step.text for step in self.steps] + [recorded.line.text]
        why = Cause.EDIT if self.edited else cause(sources, before, now, None)
        return Difference(self.position, before, now, why)

    def _open(self) -> SandboxSession:
        if self._console.ended:
            raise ConfigError("console", "ended", "open a fresh replay; see `ended`")
        return self._console


@asynccontextmanager
async def open_replay(trajectory: Trajectory, sandbox: Sandbox, to_line: int = 0) -> AsyncIterator[Replay]:
    """A fresh console in which the first `to_line` lines of `trajectory` have run.

    Raises:
        ConfigError: the trajectory cannot be typed into a console, or there is no such line.
        SandboxFault: no console could be had.
    """
    check(trajectory)
    async with sandbox.session() as console:
        replay = Replay(trajectory, console)
        await replay.to_line(to_line)
        yield replay


def check(trajectory: Trajectory) -> None:
    """Refuse what was not typed into a console: a turn of a chat holds code among other text.

    Raises:
        ConfigError: some line that was executed does not stand at a console's prompt.
    """
    for number, exchange in enumerate(exchanges(trajectory)):
        if exchange.line.execution is not None and not exchange.prompt:
            remedy = "its sampler did not type it at a console's prompt; it can be shown, but not executed again"
            raise ConfigError(f"trajectory {trajectory.id}, line {number}", exchange.line.text[:40], remedy)


def _closed(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"

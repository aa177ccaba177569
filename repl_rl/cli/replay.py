"""`repl-rl replay FILE`: show a stored trajectory, step through it in a fresh console, verify it, branch from it."""

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from rich.control import Control
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from repl_rl.cli.rollout import transcript
from repl_rl.cli.terminal import terminal
from repl_rl.cli.unread import refuse_unread
from repl_rl.credit.credited import Credited
from repl_rl.errors import ConfigError
from repl_rl.machine.files import write_named
from repl_rl.machine.outputs import refuse_other_file
from repl_rl.record.clip import clip
from repl_rl.record.console import PS1
from repl_rl.record.trajectory import LineStatus, Trajectory
from repl_rl.rollout import RolloutThread
from repl_rl.runs.replay import Branches, Determinism, Replay, Step, branch, open_replay, start_at, verify_all
from repl_rl.runs.store import Damage, Store, guarded, printable, to_text, transitions
from repl_rl.runs.store.notebook import read_notebook, to_notebook
from repl_rl.sandbox import Sandbox
from repl_rl.settings.arguments import Parsed, parse_with_sources
from repl_rl.settings.bounds import AtLeast, check_fields
from repl_rl.world import World, recorded_task

_COLOURS = {LineStatus.OK: "green", LineStatus.INCOMPLETE: "green", LineStatus.ANSWERED: "cyan"}
_HELP = "Enter: next recorded line; :b: one line back; :q: leave; anything else is run"
_REASONS = 3
_NOTEBOOK = ".ipynb"
_AT_ONCE = 8
"""Trajectories that --verify executes concurrently."""
_CONSOLE = ("sandbox", "trust")
_POLICY = ("engine", "model", "temperature")
_ONLY_BRANCH = "it has no effect without --branch; leave it out"
_ONLY_SHOWN = "without a terminal the trajectory is only shown, and no line runs; add --to-line 0, or leave it out"
_WHOLE = "it has no effect with --verify or --export; leave it out"
Mode = Literal["verify", "export", "branch", "step", "show"]
_UNREAD: Mapping[Mode, Mapping[str, Sequence[str]]] = {
    "verify": {_WHOLE: ("to_line",), _ONLY_BRANCH: _POLICY},
    "export": {_WHOLE: ("to_line",), "it has no effect with --export; leave it out": _CONSOLE, _ONLY_BRANCH: _POLICY},
    "branch": {},
    "step": {_ONLY_BRANCH: _POLICY},
    "show": {_ONLY_SHOWN: _CONSOLE, _ONLY_BRANCH: _POLICY},
}
"""Options that each mode does not read, by the remedy of their refusal."""
_UP = Control((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2))
"""Control codes that erase the prompt at which Enter was pressed. The recorded line is printed in its place."""


@dataclass(frozen=True)
class ReplayConfig:
    """Show a trajectory. In a terminal, step through it in a fresh console and type your own lines."""

    file: Positional[Path]
    """Run folder, trajectories folder, one of its files, or a notebook that was exported from one."""
    id: str | None = None
    """Id of the trajectory. Default: the first one, or with --verify all of them."""
    to_line: Annotated[int | None, AtLeast(0)] = None
    """Number of recorded lines to run in a fresh console, >= 0. Then the lines of the standard input run."""
    verify: bool = False
    """Execute again and compare the output. The exit code is 1 if anything differs, or nothing can be executed."""
    branch: Annotated[int, AtLeast(0)] = 0
    """Number of continuations to sample with the policy after --to-line, >= 0."""
    export: Path | None = None
    """Write the trajectory to this file: a notebook if it ends in .ipynb, else text. Without it, it is shown."""
    sandbox: str | None = None
    """Sandbox for the lines. Default: that of the run, if it isolates and is on this machine."""
    engine: str | None = None
    """Engine that samples branches. Default: that of the run."""
    model: str | None = None
    """Policy that samples branches, as in `train`. Default: the one that the run trained, or else started from."""
    temperature: Annotated[float, AtLeast(0)] = 1.0
    """Sampling temperature of branches, >= 0. 0 is greedy."""
    trust: bool = False
    """Import each module:name that the run or its tasks name, and start the container image that the run names."""

    def __post_init__(self) -> None:
        check_fields(self)
        chosen = [name for name in ("verify", "branch", "export") if getattr(self, name)]
        if len(chosen) > 1:
            raise ConfigError("options", chosen, "choose one of them")

    @property
    def mode(self) -> Mode:
        """Mode that the options select. Lines are stepped through only if someone types, or if lines are piped in."""
        if self.verify:
            return "verify"
        if self.export:
            return "export"
        if self.branch:
            return "branch"
        return "step" if self.to_line is not None or sys.stdin.isatty() else "show"


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    asked = parse_with_sources(ReplayConfig, "replay", argv)
    refuse_without_effect(asked)
    config, mode = asked.config, asked.config.mode
    entries, damage = _read(config)
    console = terminal()
    if mode == "verify":
        code = _verify(config, [entry.trajectory for entry in entries], console)
        _print_damage(damage, console)
        return code or int(bool(damage))
    (entry,) = entries
    if (config.to_line or 0) > len(entry.trajectory.lines):
        raise ConfigError("to_line", config.to_line, f"the trajectory has {len(entry.trajectory.lines)} lines")
    if config.export is not None:
        _export(entry, config.export)
    elif mode == "branch":
        _branch(config, entry, console)
    elif mode == "step":
        asyncio.run(_step(config, entry, console))
    else:
        _show(entry, console)
    _print_damage(damage, console)
    return 0


def refuse_without_effect(asked: Parsed[ReplayConfig]) -> None:
    """Reject options that are given but have no effect.

    Raises:
        ConfigError: there is one.
    """
    usual = ReplayConfig(asked.config.file)
    for remedy, names in _UNREAD[asked.config.mode].items():
        refuse_unread(asked, usual, names, remedy)
    if asked.config.file.suffix == _NOTEBOOK:
        refuse_unread(asked, usual, ["id"], "a notebook has one trajectory; leave it out")


def _read(config: ReplayConfig) -> tuple[Sequence[Credited], Sequence[Damage]]:
    """Load the chosen trajectory, or all of them with --verify, and the list of unreadable parts."""
    if config.file.suffix == _NOTEBOOK:
        return (read_notebook(config.file),), ()
    store = Store(config.file)
    if config.verify and config.id is None:
        return tuple(store), store.damage
    if config.id is None and not store.ids:
        raise ConfigError("trajectories", str(store.source), "there are none; give another file")
    return (store[config.id or store.ids[0]],), store.damage


def _print_damage(damage: Sequence[Damage], console: Console) -> None:
    for each in damage:
        console.print(Text(f"not readable: {each}", style="yellow"))


def _export(entry: Credited, path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise ConfigError("export", str(path), "there is no such folder; give a file in one that exists")
    text = to_notebook(entry) if path.suffix == _NOTEBOOK else to_text(entry.trajectory)
    content = text.encode()
    # A file with the same content is an earlier export, so it may be replaced.
    refuse_other_file("export", path, lambda file: file.read_bytes() == content)
    with write_named(path, "export") as torn:
        torn.write_bytes(content)
    print(path)


def _show(entry: Credited, console: Console) -> None:
    """Print the recorded transcript, then a table of its lines."""
    console.print(transcript(entry.trajectory))
    table = Table("line", "status", "ms", "reward", "advantage", "", box=None, header_style="dim")
    credit_L = entry.credit_L or (None,) * len(entry.trajectory.lines)
    for number, (transition, credit) in enumerate(zip(transitions(entry.trajectory), credit_L, strict=True)):
        run = transition.line.execution
        figures = (f"{credit.reward:+.3g}", f"{credit.advantage:+.3g}") if credit else ("", "")
        table.add_row(
            str(number),
            _status(run.status) if run else Text("not run", style="dim"),
            f"{run.elapsed_s * 1000:.1f}" if run else "",
            *figures,
            Text(printable(transition.line.text.rstrip("\n")).replace("\n", "⏎")[:60], style="dim"),
        )
    console.print(table)


def _status(status: LineStatus) -> Text:
    return Text(status.value, style=_COLOURS.get(status, "red"))


async def _step(config: ReplayConfig, entry: Credited, console: Console) -> None:
    """Rebuild the console and follow the user's input. A step back rebuilds it up to an earlier line."""
    trajectory = entry.trajectory
    console.print(Text(guarded(clip(trajectory.prompt.text), prompt=True).removesuffix(PS1).rstrip("\n")))
    if sys.stdin.isatty():
        console.print(Text(_HELP, style="dim"))
    line: int | None = 0
    async with _consoles(config, 1) as sandbox:
        while line is not None:
            async with open_replay(trajectory, sandbox, line) as replay:
                # On the first pass, run and show the lines up to --to-line.
                while not line and replay.position < (config.to_line or 0):
                    _tell(await replay.step(), replay, console)
                line = await _typed(replay, console)


async def _typed(replay: Replay, console: Console) -> int | None:
    """Run the user's input. Return the line to go back to, or None to leave."""
    terminal = sys.stdin.isatty()
    while True:
        if terminal:
            console.print(Text(replay.prompt, style="bold"), end="")
        typed = await asyncio.to_thread(sys.stdin.readline)
        word = typed.strip() if terminal else ""
        # Enter runs the next recorded line, except within a cell that the user typed, which an empty line ends.
        recorded = replay.prompt == PS1 or replay.steps[-1].recorded is not None
        if not typed or word == ":q" or (replay.ended and not typed.strip()):
            return None
        if word == ":b":
            back = max(0, replay.position - 1)
            console.print(Text(f"(back to line {back}, in a fresh console)", style="dim"))
            return back
        if terminal and not word and recorded:
            console.control(_UP)
            _tell(await replay.step(), replay, console)
            continue
        step = await replay.type(typed)
        console.print(Text(guarded(clip(step.result.text))), end="")


def _tell(step: Step | None, replay: Replay, console: Console) -> None:
    """Print a line that ran again: its text, its output, and the difference from the record."""
    if step is None:
        console.print(Text("(a line that no console ran)", style="dim"))
        return
    shown = Text(printable(step.recorded.prompt if step.recorded else ""), style="dim")
    shown.append(printable(clip(step.text.rstrip("\n"))), style="bold not dim")
    shown.append(f"   {step.result.status}", style=_COLOURS.get(step.result.status, "red"))
    console.print(shown)
    console.print(Text(guarded(clip(step.result.text))), end="")
    if step.difference is not None:
        asked = step.recorded is not None and step.recorded.asked != ""
        was = guarded(clip(step.difference.recorded.text), prompt=asked)
        console.print(Text(f"recorded otherwise ({step.difference.cause}): {was}", style="yellow"))


def _verify(config: ReplayConfig, trajectories: Sequence[Trajectory], console: Console) -> int:
    async def run(progress: Progress) -> Determinism:
        bar = progress.add_task("", total=len(trajectories))
        async with _consoles(config, _AT_ONCE) as sandbox:
            return await verify_all(trajectories, sandbox, _AT_ONCE, lambda _: progress.advance(bar))

    console.print(f"executing {len(trajectories)} trajectories again ...")
    with Progress(
        BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console, transient=True
    ) as progress:
        found = asyncio.run(run(progress))
    table = Table("trajectory", "line", "cause", "recorded", "now")
    for v in found.divergent:
        assert v.difference is not None
        sides = (v.difference.recorded, v.difference.now)
        texts = [Text(printable(f"{side.status}: {clip(side.text)}").replace("\n", "⏎")[:60]) for side in sides]
        table.add_row(Text(printable(v.id)), str(v.difference.line), v.difference.cause.value, *texts)
    if found.divergent:
        console.print(table)
    skipped = len(found.verifications) - found.verified
    score = "unknown" if found.score is None else f"{found.score:.2%}"
    console.print(
        f"determinism {score}: {found.verified} trajectories executed again, {len(found.divergent)} differ"
        + (f", {skipped} could not be executed" if skipped else "")
    )
    for reason, count in Counter(v.skipped for v in found.verifications if v.skipped).most_common(_REASONS):
        console.print(Text(printable(f"  could not be executed: {count}: {clip(reason)}")))
    for cause, count in found.causes.most_common():
        console.print(f"  {cause}: {count}")
    return int(bool(found.divergent) or found.score is None)


def _branch(config: ReplayConfig, entry: Credited, console: Console) -> None:
    trajectory = entry.trajectory
    start = start_at(trajectory, config.to_line or 0)
    # Sandbox, engine and policy are those of the run unless an option overrides them.
    chosen = World.recorded(
        config.file, sandbox=config.sandbox, engine=config.engine, model=config.model, trust=config.trust
    )
    world = replace(chosen, concurrency=config.branch)
    task = recorded_task(config.file, trajectory.task_id, world)
    with RolloutThread(world.rollouts, {}) as source:
        found: Branches = source.run(branch(source.rollouts, start, task, config.branch, config.temperature))
    for each in found.trajectories:
        console.print(transcript(each))
        console.rule(style="dim")
    value = "not graded: its task is not known here" if found.value is None else f"{found.value:.2f}"
    recorded = "not graded" if trajectory.outcome is None else f"{trajectory.outcome:g}"
    console.print(
        f"after line {start.line}: mean outcome of {len(found.trajectories)} continuations {value}; recorded {recorded}"
    )


def _consoles(config: ReplayConfig, warm: int) -> AbstractAsyncContextManager[Sandbox]:
    return World.recorded_consoles(config.file, sandbox=config.sandbox, trust=config.trust).consoles(warm)

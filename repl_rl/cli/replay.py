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

from repl_rl.cli.rollout import format_transcript
from repl_rl.cli.terminal_output import make_terminal
from repl_rl.cli.unused_options import refuse_unread
from repl_rl.credit.credited_trajectory import CreditedTrajectory
from repl_rl.errors import ConfigError
from repl_rl.rollout import SyncRollouts
from repl_rl.rollout_config import RolloutConfig, find_recorded_task
from repl_rl.runs.replay import (
    Branches,
    DeterminismReport,
    Replay,
    ReplayedLine,
    branch,
    get_branch_point,
    open_replay,
    verify_all,
)
from repl_rl.runs.store import (
    DamagedRegion,
    Store,
    build_transitions,
    escape_control_characters,
    escape_output,
    to_text,
)
from repl_rl.runs.store.export_formats import read_notebook, to_notebook
from repl_rl.sandbox import Sandbox
from repl_rl.settings.argument_parser import ParsedSettings, parse_with_sources
from repl_rl.settings.value_bounds import AtLeast, check_fields
from repl_rl.trajectory.console_text import PS1, clip_middle
from repl_rl.trajectory.trajectory import LineStatus, Trajectory
from repl_rl.utils.atomic_files import validate_replaceable_file, write_named

_COLOURS = {LineStatus.OK: "green", LineStatus.INCOMPLETE: "green", LineStatus.ANSWERED: "cyan"}
_HELP = "Enter: next recorded line; :b: one line back; :q: leave; anything else is run"
_REASONS_SHOWN = 3
_NOTEBOOK = ".ipynb"
_CONCURRENT = 8
"""Trajectories that --verify executes concurrently."""
_CONSOLE_OPTIONS = ("sandbox", "trust")
_POLICY_OPTIONS = ("engine", "model", "temperature")
_ONLY_BRANCH_REMEDY = "it has no effect without --branch; leave it out"
_ONLY_SHOWN_REMEDY = (
    "without a terminal the trajectory is only shown, and no line runs; add --to-line 0, or leave it out"
)
_WHOLE_REMEDY = "it has no effect with --verify or --export; leave it out"
Mode = Literal["verify", "export", "branch", "step", "show"]
_UNREAD: Mapping[Mode, Mapping[str, Sequence[str]]] = {
    "verify": {_WHOLE_REMEDY: ("to_line",), _ONLY_BRANCH_REMEDY: _POLICY_OPTIONS},
    "export": {
        _WHOLE_REMEDY: ("to_line",),
        "it has no effect with --export; leave it out": _CONSOLE_OPTIONS,
        _ONLY_BRANCH_REMEDY: _POLICY_OPTIONS,
    },
    "branch": {},
    "step": {_ONLY_BRANCH_REMEDY: _POLICY_OPTIONS},
    "show": {_ONLY_SHOWN_REMEDY: _CONSOLE_OPTIONS, _ONLY_BRANCH_REMEDY: _POLICY_OPTIONS},
}
"""Options that each mode rejects because it does not read them, keyed by the remedy in the error message."""
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
    """Sandbox for the lines. Default: the run's sandbox, which must isolate and be available on this machine."""
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
        """Mode that the options select. Without another mode, it is step with --to-line or at a terminal, else show."""
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
    entries, damage = _read_entries(config)
    console = make_terminal()
    if mode == "verify":
        code = _verify_trajectories(config, [entry.trajectory for entry in entries], console)
        _print_damage(damage, console)
        return code or int(bool(damage))
    # Every other mode has one trajectory.
    (entry,) = entries
    if (config.to_line or 0) > len(entry.trajectory.lines):
        raise ConfigError("to_line", config.to_line, f"the trajectory has {len(entry.trajectory.lines)} lines")
    if config.export is not None:
        _export_trajectory(entry, config.export)
    elif mode == "branch":
        _sample_branches(config, entry, console)
    elif mode == "step":
        asyncio.run(_step_through(config, entry, console))
    else:
        _show_trajectory(entry, console)
    _print_damage(damage, console)
    return 0


def refuse_without_effect(asked: ParsedSettings[ReplayConfig]) -> None:
    """Reject options that are given but have no effect.

    Raises:
        ConfigError: there is one.
    """
    usual = ReplayConfig(asked.config.file)
    for remedy, names in _UNREAD[asked.config.mode].items():
        refuse_unread(asked, usual, names, remedy)
    if asked.config.file.suffix == _NOTEBOOK:
        refuse_unread(asked, usual, ["id"], "a notebook has one trajectory; leave it out")


def _read_entries(config: ReplayConfig) -> tuple[Sequence[CreditedTrajectory], Sequence[DamagedRegion]]:
    """Load the chosen trajectory, or all of them with --verify, and the list of unreadable parts."""
    if config.file.suffix == _NOTEBOOK:
        return (read_notebook(config.file),), ()
    store = Store(config.file)
    if config.verify and config.id is None:
        return tuple(store), store.damaged_regions
    if config.id is None and not store.ids:
        remedy = "it has no trajectories: a run stores them after its first step; wait for that, or give another file"
        raise ConfigError("file", str(store.source), remedy)
    return (store[config.id or store.ids[0]],), store.damaged_regions


def _print_damage(damage: Sequence[DamagedRegion], console: Console) -> None:
    for each in damage:
        console.print(Text(f"not readable: {each}", style="yellow"))


def _export_trajectory(entry: CreditedTrajectory, path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise ConfigError("export", str(path), "there is no such folder; give a file in one that exists")
    text = to_notebook(entry) if path.suffix == _NOTEBOOK else to_text(entry.trajectory)
    content = text.encode()
    # A file with the same content is an earlier export, so it may be replaced.
    validate_replaceable_file("export", path, lambda file: file.read_bytes() == content)
    with write_named(path, "export") as torn:
        torn.write_bytes(content)
    print(path)


def _show_trajectory(entry: CreditedTrajectory, console: Console) -> None:
    """Print the recorded transcript, then a table of its lines."""
    console.print(format_transcript(entry.trajectory))
    table = Table("line", "status", "ms", "reward", "advantage", "", box=None, header_style="dim")
    credit_L = entry.credit_L or (None,) * len(entry.trajectory.lines)
    for number, (transition, credit) in enumerate(zip(build_transitions(entry.trajectory), credit_L, strict=True)):
        run = transition.line.execution
        figures = (f"{credit.reward:+.3g}", f"{credit.advantage:+.3g}") if credit else ("", "")
        table.add_row(
            str(number),
            _format_status(run.status) if run else Text("not run", style="dim"),
            f"{run.elapsed_s * 1000:.1f}" if run else "",
            *figures,
            Text(escape_control_characters(transition.line.text.rstrip("\n")).replace("\n", "⏎")[:60], style="dim"),
        )
    console.print(table)


def _format_status(status: LineStatus) -> Text:
    return Text(status.value, style=_COLOURS.get(status, "red"))


async def _step_through(config: ReplayConfig, entry: CreditedTrajectory, console: Console) -> None:
    """Rebuild the console and follow the user's input. A step back rebuilds it up to an earlier line."""
    trajectory = entry.trajectory
    console.print(Text(escape_output(clip_middle(trajectory.prompt.text), prompt=True).removesuffix(PS1).rstrip("\n")))
    if sys.stdin.isatty():
        console.print(Text(_HELP, style="dim"))
    line: int | None = 0
    async with _open_consoles(config, 1) as sandbox:
        while line is not None:
            async with open_replay(trajectory, sandbox, line) as replay:
                # On the first pass, run and show the lines up to --to-line.
                while not line and replay.position < (config.to_line or 0):
                    _show_replayed_line(await replay.run_next(), replay, console)
                line = await _handle_input(replay, console)


async def _handle_input(replay: Replay, console: Console) -> int | None:
    """Run the user's input. Return the line to go back to, or None to leave."""
    terminal = sys.stdin.isatty()
    while True:
        if terminal:
            console.print(Text(replay.current_prompt, style="bold"), end="")
        typed = await asyncio.to_thread(sys.stdin.readline)
        word = typed.strip() if terminal else ""
        # Enter runs the next recorded line, except within a cell that the user typed, which an empty line ends.
        recorded = replay.current_prompt == PS1 or replay.steps[-1].recorded_line is not None
        if not typed or word == ":q" or (replay.ended and not typed.strip()):
            return None
        if word == ":b":
            back = max(0, replay.position - 1)
            console.print(Text(f"(back to line {back}, in a fresh console)", style="dim"))
            return back
        if terminal and not word and recorded:
            console.control(_UP)
            _show_replayed_line(await replay.run_next(), replay, console)
            continue
        step = await replay.run_typed(typed)
        console.print(Text(escape_output(clip_middle(step.result.text))), end="")


def _show_replayed_line(step: ReplayedLine | None, replay: Replay, console: Console) -> None:
    """Print a line that ran again: its text, its output, and the difference from the record."""
    if step is None:
        console.print(Text("(a line that no console ran)", style="dim"))
        return
    shown = Text(escape_control_characters(step.recorded_line.prompt if step.recorded_line else ""), style="dim")
    shown.append(escape_control_characters(clip_middle(step.text.rstrip("\n"))), style="bold not dim")
    shown.append(f"   {step.result.status}", style=_COLOURS.get(step.result.status, "red"))
    console.print(shown)
    console.print(Text(escape_output(clip_middle(step.result.text))), end="")
    if step.difference is not None:
        asked = step.recorded_line is not None and step.recorded_line.next_prompt != ""
        was = escape_output(clip_middle(step.difference.recorded.text), prompt=asked)
        console.print(Text(f"recorded otherwise ({step.difference.cause}): {was}", style="yellow"))


def _verify_trajectories(config: ReplayConfig, trajectories: Sequence[Trajectory], console: Console) -> int:
    """Execute the trajectories again, print the differences, and return the exit code."""

    async def run_verification(progress: Progress) -> DeterminismReport:
        bar = progress.add_task("", total=len(trajectories))
        async with _open_consoles(config, _CONCURRENT) as sandbox:
            return await verify_all(trajectories, sandbox, _CONCURRENT, lambda _: progress.advance(bar))

    console.print(f"executing {len(trajectories)} trajectories again ...")
    with Progress(
        BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console, transient=True
    ) as progress:
        found = asyncio.run(run_verification(progress))
    # One row per trajectory that differs.
    table = Table("trajectory", "line", "cause", "recorded", "now")
    for v in found.divergent:
        assert v.difference is not None
        sides = (v.difference.recorded, v.difference.now)
        texts = [
            Text(escape_control_characters(f"{side.status}: {clip_middle(side.text)}").replace("\n", "⏎")[:60])
            for side in sides
        ]
        table.add_row(Text(escape_control_characters(v.id)), str(v.difference.line), v.difference.cause.value, *texts)
    if found.divergent:
        console.print(table)
    # The totals, then the most frequent reasons and all causes.
    skipped = len(found.verifications) - found.verified_count
    score = "unknown" if found.match_rate is None else f"{found.match_rate:.2%}"
    console.print(
        f"determinism {score}: {found.verified_count} trajectories executed again, {len(found.divergent)} differ"
        + (f", {skipped} could not be executed" if skipped else "")
    )
    for reason, count in Counter(v.skip_reason for v in found.verifications if v.skip_reason).most_common(
        _REASONS_SHOWN
    ):
        console.print(Text(escape_control_characters(f"  could not be executed: {count}: {clip_middle(reason)}")))
    for cause, count in found.divergence_causes.most_common():
        console.print(f"  {cause}: {count}")
    return int(bool(found.divergent) or found.match_rate is None)


def _sample_branches(config: ReplayConfig, entry: CreditedTrajectory, console: Console) -> None:
    """Sample continuations with the policy, and print them with their mean outcome."""
    trajectory = entry.trajectory
    start = get_branch_point(trajectory, config.to_line or 0)
    # Sandbox, engine and policy are those of the run unless an option overrides them.
    chosen = RolloutConfig.from_run(
        config.file, sandbox=config.sandbox, engine=config.engine, model=config.model, trust=config.trust
    )
    rollout_config = replace(chosen, concurrency=config.branch)
    task = find_recorded_task(config.file, trajectory.task_id, rollout_config)
    with SyncRollouts(rollout_config.open_rollouts, {}) as source:
        found: Branches = source.run(branch(source.rollouts, start, task, config.branch, config.temperature))
    for each in found.trajectories:
        console.print(format_transcript(each))
        console.rule(style="dim")
    value = "not graded: its task is not known here" if found.mean_outcome is None else f"{found.mean_outcome:.2f}"
    recorded = "not graded" if trajectory.outcome is None else f"{trajectory.outcome:g}"
    console.print(
        f"after line {start.line}: mean outcome of {len(found.trajectories)} continuations {value}; recorded {recorded}"
    )


def _open_consoles(config: ReplayConfig, warm: int) -> AbstractAsyncContextManager[Sandbox]:
    return RolloutConfig.from_run_consoles(config.file, sandbox=config.sandbox, trust=config.trust).open_consoles(warm)

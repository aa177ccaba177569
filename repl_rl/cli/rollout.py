"""`repl-rl rollout`: play a few tasks and print them as console transcripts."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.text import Text

from repl_rl.cli.apply_model_defaults import apply_model_defaults
from repl_rl.cli.live_status import LiveStatus, RolloutProgress, describe_elapsed, describe_opening
from repl_rl.cli.terminal_output import make_terminal
from repl_rl.cli.unused_options import refuse_unread
from repl_rl.errors import ConfigError
from repl_rl.judges import check_judges
from repl_rl.rollout import SyncRollouts
from repl_rl.rollout.rollout_hooks import GroupJudging, find_hook
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.store import escape_control_characters, escape_output, get_step_path, write_step
from repl_rl.settings.argument_parser import ParsedSettings, parse_with_sources
from repl_rl.settings.help_pages import COMMON
from repl_rl.settings.value_bounds import AtLeast, check_fields
from repl_rl.tasks import Split, Task
from repl_rl.trajectory.console_text import clip_middle
from repl_rl.trajectory.trajectory import HostCall, Line, LineEnd, Observed, Trajectory

_CALL_CHARS = 200
"""Longest call or answer of a host function to show, characters."""
_MOST_CALLS = 20
"""Largest number of calls to show per line."""


@dataclass(frozen=True)
class RolloutCommandConfig(RolloutConfig):
    """Play tasks and print the transcripts. Text of the policy is bold, output of the console is not."""

    count: Annotated[int, AtLeast(1), COMMON] = 4
    """Tasks to play, >= 1."""
    temperature: Annotated[float, AtLeast(0), COMMON] = 1.0
    """Sampling temperature, >= 0. 0 is greedy."""
    save: Annotated[Path | None, COMMON] = None
    """Folder to store the trajectories in. It must not have rollouts yet. Without it they are only printed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    asked = parse_with_sources(RolloutCommandConfig, "rollout", argv)
    refuse_without_effect(asked)
    config = asked.config
    if config.save is not None and os.path.lexists(there := get_step_path(config.save, 0)):
        raise ConfigError("save", str(config.save), f"it has rollouts already, {there.name}; name another folder")
    config = apply_model_defaults(asked)
    # Find bad judges and workspaces before the engine opens.
    tasks = config.draw_tasks(Split.HELD_OUT, config.count)
    check_judges(tasks)
    config.try_workspaces(tasks)
    console = make_terminal()
    if len(tasks) < config.count and "count" in asked.explicit_names:
        console.print(f"{config.tasks} has {len(tasks)} held-out tasks, and --count is {config.count}; playing those")
    console.print(describe_opening(config))
    with LiveStatus(console) as status, ExitStack() as stack:
        with status.show(describe_elapsed("opening")):
            source = stack.enter_context(SyncRollouts(config.open_rollouts, {task.id: task for task in tasks}))
        trajectories = _play_and_print(config, tasks, source, console, status)
    if config.save is not None:
        console.print(f"stored in {write_step(config.save, 0, trajectories)}")
    return 0


def _play_and_print(
    config: RolloutCommandConfig, tasks: Sequence[Task], source: SyncRollouts, console: Console, status: LiveStatus
) -> Sequence[Trajectory]:
    """Play the tasks, and print each transcript as soon as its rollout has ended."""

    def print_transcript(trajectory: Trajectory) -> None:
        console.print(format_transcript(trajectory))
        console.rule(style="dim")

    # Group judges change outcomes once all rollouts have ended.
    at_once = find_hook(source.rollouts.hooks, GroupJudging) is None
    if at_once:
        source.progress.subscribe(print_transcript)
    progress = RolloutProgress("playing", len(tasks), config.rollout.max_lines, lambda: source.stats.counts)
    with status.show(progress.describe):
        trajectories = source.sample(tasks, config.temperature)
    for trajectory in () if at_once else trajectories:
        print_transcript(trajectory)
    return trajectories


def refuse_without_effect(asked: ParsedSettings[RolloutCommandConfig]) -> None:
    """Reject options that are given but have no effect.

    Raises:
        ConfigError: there is one.
    """
    remedy = "weights do not change while this command plays; leave it out"
    refuse_unread(asked, RolloutCommandConfig(), ["kv_on_sync"], remedy)


def format_transcript(trajectory: Trajectory) -> Text:
    """Return a trajectory as the console showed it, followed by its stop and outcome.

    Calls of host functions follow their line. Rollouts that were sampled for them come at the end.
    """
    shown = Text(escape_control_characters(trajectory.prompt.text), style="dim")
    for segment in trajectory.segments:
        if isinstance(segment, Observed):
            shown.append(escape_output(clip_middle(segment.text), prompt=True), style="not dim")
        else:
            shown.append(
                escape_control_characters(clip_middle("".join(map(_format_line, segment.lines)))), style="bold not dim"
            )
            shown.append("".join(map(_format_calls, segment.lines)), style="cyan not bold not dim")
    # The last row has the stop, the outcome and the size. Rollouts that calls sampled follow.
    outcome = "not graded" if trajectory.outcome is None else f"outcome {trajectory.outcome:g}"
    failure = f", {trajectory.failure.message}" if trajectory.failure else ""
    shown.append(f"\n[{trajectory.stop}{failure}; {outcome}; {trajectory.sampled_tokens} sampled tokens]", style="cyan")
    for child in trajectory.children:
        shown.append(f"\n\n[{escape_control_characters(child.id)}: sampled for a call]\n", style="cyan not dim")
        shown.append_text(format_transcript(child))
    return shown


def _format_calls(line: Line) -> str:
    """Return the rows below a line: candidates that were not chosen, and calls. They begin on a new row."""
    calls = line.execution.calls if line.execution is not None else ()
    rows = [f"  [not chosen: {_flatten_text(other.text)}]\n" for other in line.alternatives]
    rows += [_format_call(call) for call in calls[:_MOST_CALLS]]
    if len(calls) > _MOST_CALLS:
        rows.append(f"  [and {len(calls) - _MOST_CALLS} calls more]\n")
    start = "" if not rows or _format_line(line).endswith("\n") else "\n"
    return start + "".join(rows)


def _format_call(call: HostCall) -> str:
    told = f"-> {call.answer}" if call.error is None else f"failed: {call.error}"
    child = f"; {call.child}, {'trained' if call.trained else 'masked'}" if call.child else ""
    texts = (clip_middle(part, _CALL_CHARS) for part in (f"{call.name}({call.arguments})", told))
    return f"  [{_flatten_text(' '.join(texts))} ({call.elapsed_s * 1000:.1f} ms{_flatten_text(child)})]\n"


def _flatten_text(text: str) -> str:
    """Return a text as one row, escaped and shortened."""
    return escape_control_characters(clip_middle(text, 2 * _CALL_CHARS + 200)).replace("\n", "⏎")


def _format_line(line: Line) -> str:
    """Return a line's text. A newline is added if an end token ended the line and the console ran it."""
    ran = line.execution is not None and line.execution.ran
    return f"{line.text}\n" if ran and line.end is LineEnd.EOS else line.text

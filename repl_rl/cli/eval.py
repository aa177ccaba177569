"""`repl-rl eval`: evaluate a policy on held-out tasks, with confidence intervals, and compare two evaluations."""

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from rich.table import Table

from repl_rl.cli.apply_model_defaults import apply_model_defaults
from repl_rl.cli.live_status import LiveStatus, RolloutProgress, describe_elapsed, describe_opening
from repl_rl.cli.next_steps import print_unsolved_hint, select_flags
from repl_rl.cli.terminal_output import make_terminal
from repl_rl.cli.unused_options import refuse_unread
from repl_rl.errors import ConfigError
from repl_rl.evaluation import (
    Comparison,
    EvaluationFolder,
    Interval,
    Study,
    compare,
    is_study,
    play_all,
    read_study,
    validate_same_tasks,
    write_study,
)
from repl_rl.judges import check_judges
from repl_rl.rollout import SyncRollouts
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.run_metadata import CONFIG
from repl_rl.settings.argument_parser import ParsedSettings, dump_toml, parse_with_sources
from repl_rl.settings.help_pages import COMMON
from repl_rl.settings.model_defaults import PretrainedDefault
from repl_rl.settings.value_bounds import AtLeast, check_fields
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.atomic_files import validate_replaceable_file, write_named
from repl_rl.utils.describe_os_errors import catch_os_errors


@dataclass(frozen=True)
class EvalConfig(RolloutConfig):
    """Evaluate a policy on held-out tasks, at temperature 1 and greedily."""

    split: Annotated[Literal["held_out", "train", "all"], COMMON] = "held_out"
    """Part of the tasks. Use `all` for a file that is a test set as a whole."""
    count: Annotated[int, AtLeast(1), PretrainedDefault.on_cpu(32), COMMON] = 240
    """Maximum number of tasks, >= 1."""
    samples: Annotated[int, AtLeast(1), COMMON] = 1
    """Rollouts per task at temperature 1, >= 1. With more, --k can report pass@k."""
    k: Annotated[int, AtLeast(1), COMMON] = 1
    """The k of pass@k, 1 to `samples`: of k rollouts, at least one must be right. pass@k is reported if k > 1."""
    greedy: Annotated[bool, COMMON] = True
    """Also play one greedy rollout per task."""
    out: Annotated[Path | None, COMMON] = None
    """Folder for trajectories and eval.json. An interrupted evaluation resumes there. Without it nothing is saved."""
    json: Annotated[Path | None, COMMON] = None
    """Another file for the metrics. Without it they are printed, and saved in `out`."""
    baseline: Annotated[Path | None, COMMON] = None
    """eval.json of another evaluation of the same tasks, to compare with. Without it nothing is compared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        if self.k > self.samples:
            raise ConfigError("k", self.k, f"give at most --samples, which is {self.samples}")

    @property
    def settings_toml(self) -> str:
        """Settings that decide the metrics, as TOML. An evaluation resumes only if these are the same."""
        return dump_toml(
            replace(self, model=self.policy.reference, out=None, json=None, baseline=None, concurrency=1, k=1)
        )


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    asked = parse_with_sources(EvalConfig, "eval", argv)
    refuse_without_effect(asked)
    recorded = asked.config.out / CONFIG if asked.config.out else None
    config = apply_model_defaults(asked, recorded).resolve_prompt_settings(recorded)
    console = make_terminal()
    tasks = config.draw_tasks(config.split, config.count)
    # Find bad judges, workspaces and files now, before the engine opens and before anything is written.
    check_judges(tasks)
    config.try_workspaces(tasks)
    if config.json is not None:
        validate_replaceable_file("json", config.json, is_study)
        if config.baseline is not None and os.path.realpath(config.json) == os.path.realpath(config.baseline):
            raise ConfigError("json", str(config.json), "--baseline names the same file; write to another one")
    # The other evaluation must have the same tasks.
    other = read_study(config.baseline) if config.baseline else None
    if other is not None:
        validate_same_tasks(other, (task.id for task in tasks))
    # Play, print the metrics, and save them.
    folder = EvaluationFolder(config.out, config.settings_toml) if config.out else None
    with folder.lock() if folder else nullcontext():
        study = _play_remaining(config, tasks, folder, console)
        console.print(_build_table(config, study))
        console.print(_format_result(config, study))
        if not study.solve_rate.value and (study.greedy is None or not study.greedy.value):
            print_unsolved_hint(console, config.model, config.tasks, select_flags(argv))
        about: dict[str, str | int] = {"model": config.policy.reference, "source": config.tasks, "seed": config.seed}
        if config.out is not None:
            with catch_os_errors("file", config.out / "eval.json", then=", then give the command again"):
                write_study(config.out / "eval.json", study, config.k, about)
        if config.json is not None:
            with (
                catch_os_errors("file", config.json, then=", then give the command again"),
                write_named(config.json) as place,
            ):
                write_study(place, study, config.k, about)
    if other is not None:
        _show_comparison(compare(study, other), str(config.baseline), console)
    return 0


def refuse_without_effect(asked: ParsedSettings[EvalConfig]) -> None:
    """Reject options that are given but have no effect.

    Raises:
        ConfigError: there is one.
    """
    refuse_unread(asked, EvalConfig(), ["kv_on_sync"], "weights do not change during an evaluation; leave it out")


def _play_remaining(
    config: EvalConfig, tasks: Sequence[Task], folder: EvaluationFolder | None, console: Console
) -> Study:
    """Play the tasks. The engine opens only if rollouts are left to play."""
    with ExitStack() as stack:
        opened: list[SyncRollouts] = []
        status = stack.enter_context(LiveStatus(console))

        def play_tasks(wanted: Sequence[Task], temperature: float) -> Sequence[Trajectory]:
            # The first rollout that is not stored yet opens the engine.
            if not opened:
                console.print(describe_opening(config))
                with status.show(describe_elapsed("opening")):
                    rollouts = SyncRollouts(config.open_rollouts, {task.id: task for task in tasks})
                    opened.append(stack.enter_context(rollouts))
                console.print(f"playing {len(tasks)} tasks (--count sets the number) ...")
            (source,) = opened
            title = "greedy rollouts" if temperature == 0 else f"rollouts at temperature {temperature:g}"
            progress = RolloutProgress(title, len(wanted), config.rollout.max_lines, lambda: source.stats.counts)
            try:
                with status.show(progress.describe):
                    return source.sample(wanted, temperature)
            except BaseException:
                # Rollouts that end early are not like the others, so no rate is printed.
                kept = (
                    f"; {config.out} keeps those of finished portions" if config.out else "; --out keeps finished ones"
                )
                console.print(f"{progress.describe()}{kept}")
                raise

        def show_progress(done: int) -> None:
            if done < len(tasks):
                console.print(f"{done} of {len(tasks)} tasks played")

        return play_all(tasks, play_tasks, config.samples, config.greedy, folder, show_progress)


def _build_table(config: EvalConfig, study: Study) -> Table:
    more = (f"pass@{config.k}",) if config.k > 1 else ()
    title = f"{config.model} on {len(study.results)} tasks ({config.split.replace('_', '-')})"
    table = Table("family", "tasks", "solved (95 % interval)", *more, "greedy", title=title)
    for name, part in [*study.families.items(), ("all", study)]:
        cells = [name or "-", str(len(part.results)), str(part.solve_rate)]
        cells += [_format_percent(part.pass_at(config.k))] if more else []
        table.add_row(*cells, _format_percent(part.greedy))
    return table


def _format_percent(interval: Interval | None) -> str:
    return f"{interval.value:.1%}" if interval else "-"


def _format_result(config: EvalConfig, study: Study) -> str:
    parts = [f"solved {study.solve_rate} at temperature 1"]
    parts += [f"pass@{config.k} {study.pass_at(config.k)}"] if config.k > 1 else []
    parts += [f"{study.greedy} greedy"] if study.greedy else []
    # Judges with partial credit, such as the share of right values, give other outcomes than 0 and 1.
    if study.mean_outcome is not None and not math.isclose(study.mean_outcome, study.solve_rate.value):
        parts.append(f"mean outcome {study.mean_outcome:.3f}")
    parts.append(f"{study.line_error_rate:.1%} of lines in error")
    parts += [f"{study.faults} rollouts failed on our side and count nowhere"] if study.faults else []
    return ", ".join(parts)


def _show_comparison(comparison: Comparison, against: str, console: Console) -> None:
    table = Table("family", "difference, points", "95 % interval", title=f"compared with {against}, task by task")
    for name, d in [*comparison.families.items(), ("all", comparison.difference)]:
        table.add_row(name or "-", f"{100 * d.value:+.1f}", f"{100 * d.low:+.1f} to {100 * d.high:+.1f}")
    console.print(table)
    console.print(str(comparison))

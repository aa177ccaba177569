"""Suggestions of next commands for the user. A suggested command runs as printed."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.text import Text

from repl_rl.cli.terminal_output import make_terminal
from repl_rl.errors import ConfigError
from repl_rl.runs.list_runs import RunInfo, RunStatus, list_runs
from repl_rl.runs.run_metadata import RUNS
from repl_rl.runs.store.export_formats import escape_control_characters

SERVING = ("fastapi", "uvicorn", "prometheus_client")
"""Packages of the extra that `repl-rl serve` needs."""
USUAL = {"engine": "vllm", "sandbox": "local"}
"""Default engine and sandbox of the commands. A suggested command gets a flag for a run's choice only if it differs."""
_SIZES = frozenset({"rollout", "limits", "trainer", "train_tasks", "eval_tasks", "context_tokens", "concurrency"})
"""Settings, and tables of settings, that decide how long a run takes."""
_MOST_SHOWN = 200
"""Longest list of setting names to show, characters."""
_FINAL = ("gateway", "nodes")
"""Sandboxes whose consoles take no line after an answer, so no server can use them."""


@dataclass(frozen=True, slots=True)
class NextStep:
    """Command with its purpose."""

    command: str
    description: str


def suggest_next_steps(run: Path, settings: Mapping[str, object], mine: bool = False) -> list[NextStep]:
    """Return the next commands for a finished run: view its report, replay a rollout, ask its policy.

    Args:
        run: the run folder.
        settings: the contents of its config.toml.
        mine: True if this command trained the run. The suggested flags then include the run's sandbox, and --trust
            if its settings name code. Other runs may be untrusted. They get no --trust, and no sandbox but docker.
    """
    folder, sandbox = shlex.quote(str(run)), str(settings.get("sandbox", USUAL["sandbox"]))
    allowed = " --trust" if mine and _is_naming_code(settings) else ""
    choice = (
        f" --sandbox {shlex.quote(sandbox)}" if sandbox != USUAL["sandbox"] and (mine or sandbox == "docker") else ""
    )
    steps = [
        NextStep(f"repl-rl view {folder}", "the report: curves, every rollout"),
        NextStep(f"repl-rl replay {folder}{choice}", "a rollout, line by line in a fresh console"),
    ]
    # Without the packages of the server, suggest branches to sample from the policy.
    if find_missing_packages(SERVING):
        branch = f"repl-rl replay {folder} --branch 4{choice}{allowed}"
        return [*steps, NextStep(branch, "let the trained policy go on four times")]
    engine = str(settings.get("engine", USUAL["engine"]))
    own = f" --engine {shlex.quote(engine)}" if engine != USUAL["engine"] else ""
    own += choice if sandbox not in _FINAL else ""
    return [*steps, NextStep(f"repl-rl serve --run {folder}{own}{allowed}", "ask it, in a browser or by OpenAI's API")]


def select_flags(argv: Sequence[str]) -> list[str]:
    """Return the flags of a command line that a later `train` of another policy needs as well: its sizes and limits."""
    kept, is_kept = list[str](), False
    for word in argv:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            is_kept = name.partition(".")[0] in _SIZES or name in _SIZES
        if is_kept:
            kept.append(word)
    return kept


def print_unsolved_hint(console: Console, model: str, tasks: str, flags: Sequence[str] = ()) -> None:
    """Print what helps a policy that solves none of the held-out tasks. `flags` are those of `select_flags`."""
    console.print(
        "no held-out task is solved: a group whose rollouts all fail teaches nothing but to avoid errors. "
        "Demonstrations teach the console's format first:"
    )
    print_steps(console, suggest_demonstrations(model, tasks, flags))


def suggest_demonstrations(model: str, tasks: str, flags: Sequence[str] = ()) -> list[NextStep]:
    """Return the commands that teach a policy the console's format before it is trained on `tasks`, with `flags`."""
    policy, source = shlex.quote(model), shlex.quote(tasks)
    sizes = "".join(f" {shlex.quote(flag)}" for flag in flags)
    return [
        NextStep(
            f"repl-rl transcripts --from-tasks builtin:quickstart --model {policy} --count 256 --out demonstrations",
            "demonstrations of built-in tasks",
        ),
        NextStep(f"repl-rl sft --model {policy} --data demonstrations --out taught", "fine-tune the policy on them"),
        NextStep(f"repl-rl train --model taught --tasks {source} --name taught{sizes}", "train the fine-tuned policy"),
    ]


def _is_naming_code(settings: Mapping[str, object]) -> bool:
    """Return True if a setting of a run names code to import, or a file to read as a prompt."""
    # The import takes seconds, which commands that end without a run should not spend.
    from repl_rl.rollout_config import validate_recorded_settings

    try:
        validate_recorded_settings(settings, "")
    except ConfigError:
        return True
    return False


def find_missing_packages(packages: Sequence[str]) -> list[str]:
    """Return the packages that are not installed."""
    return [package for package in packages if find_spec(package) is None]


def suggest_resume(run: RunInfo) -> NextStep:
    """Return the command that resumes a run, with a warning if its settings run code or name files."""
    settings, launcher = run.settings, "repl-rl"
    # Suggest as many processes as the run used.
    if (processes := run.get_number("processes") or 1) > 1:
        launcher = f"torchrun --nproc-per-node {processes:.0f} -m repl_rl.cli"
    command = f"{launcher} train --config {shlex.quote(str(run.path / 'config.toml'))} --resume"
    if settings.get("overwrite"):
        command += " --no-overwrite"
    # A run that was moved needs its present folder.
    if Path(str(settings.get("out")), str(settings.get("name"))).resolve() != run.path.resolve():
        command += f" --out {shlex.quote(str(run.path.parent))} --name {shlex.quote(run.path.name)}"
    obeyed = escape_control_characters(", ".join(_find_unsafe_settings(settings)))[:_MOST_SHOWN]
    warning = f"; for a run of your own alone: it obeys the run's {obeyed}" if obeyed else ""
    return NextStep(command, f"resume it where it stopped{warning}")


def _find_unsafe_settings(settings: Mapping[str, object]) -> list[str]:
    """Return the names of a run's settings that a stranger may not decide. `train --config` obeys them nevertheless.

    They name code to import, a file to read as a prompt, or consoles that are not isolated on this machine.
    """
    # These imports take seconds, which commands that end without a run should not spend.
    from repl_rl.rollout_config import RolloutConfig, validate_recorded_settings
    from repl_rl.sandbox import SANDBOXES
    from repl_rl.settings.argument_parser import flatten, read_table
    from repl_rl.settings.component_registry import validate_no_code

    found = []
    for key, value in flatten(settings):
        try:
            validate_recorded_settings({key: value}, "")
            if key.startswith("trainer."):
                # A reward function is the key of its weight.
                validate_no_code(key, f"{key} = {value}")
        except ConfigError:
            found.append(key)
    # The sandbox depends on several settings, so it is checked as a whole.
    chosen = {
        key: value for key, value in settings.items() if key in {"sandbox", *SANDBOXES.get_entries_with_options()}
    }
    try:
        SANDBOXES.resolve(read_table(RolloutConfig, chosen, "").sandbox).validate_recorded_choice("")
    except ConfigError:
        found.append("sandbox")
    return found


def print_welcome() -> None:
    """Print the suggested next commands for this folder."""
    console = make_terminal()
    runs = [run for run in (list_runs(RUNS) if RUNS.is_dir() else []) if run.is_run]
    # A run in progress comes first, else the run that was written last.
    newest = next((run for run in runs if run.status is RunStatus.RUNNING), runs[0] if runs else None)
    if newest is None:
        console.print(
            "repl-rl trains a policy to reason in a live Python console. There is no run yet.", soft_wrap=True
        )
        train = "repl-rl train" + (" --engine transformers" if find_missing_packages(["vllm"]) else "")
        steps = [NextStep(train, "train the bundled policy, minutes on two cores")]
        steps += [NextStep("repl-rl doctor", "what works on this machine, and what helps where it does not")]
    else:
        console.print(Text(_describe_run(newest)), soft_wrap=True)
        steps = _suggest_for_run(newest)
        steps += [NextStep("repl-rl runs", f"all runs here ({len(runs)})")] if len(runs) > 1 else []
    print_steps(console, [*steps, NextStep("repl-rl --help", "every verb")])


def _describe_run(run: RunInfo) -> str:
    """Return a sentence about the state and the result of a run."""
    far = f"step {run.step}" + (f" of {run.steps}" if run.steps else "")
    first, last = run.get_number("solve_rate_first"), run.get_number("solve_rate_last")
    if run.status is RunStatus.RUNNING:
        told = f"is at {far}"
    elif run.is_resumable:
        told = (
            f"was {run.status} after {far}"
            if run.status is not RunStatus.FAILED
            else f"failed after {far}: {run.reason}"
        )
    else:
        told = "is finished" + ("" if first is None or last is None else f": {last:.1%} solved, {first:.1%} before")
    return escape_control_characters(f"{run.path} {told}.")


def _suggest_for_run(run: RunInfo) -> list[NextStep]:
    """Return the commands that fit the state of a run: follow it, resume it, or use its result."""
    folder = shlex.quote(str(run.path))
    if run.status is RunStatus.RUNNING:
        return [NextStep(f"repl-rl view {folder} --serve", "follow it")]
    if run.is_resumable:
        looked_at = NextStep(f"repl-rl view {folder}", "what it has so far")
        return [suggest_resume(run), looked_at] if "name" in run.settings else [looked_at]
    return suggest_next_steps(run.path, run.settings)


def print_steps(console: Console, steps: Sequence[NextStep]) -> None:
    """Print commands with their purposes. Lines do not wrap, so that commands can be copied."""
    width = max(len(step.command) for step in steps)
    for step in steps:
        line = Text(f"  {step.command:<{width}}  ", style="bold")
        console.print(line.append(step.description, style="not bold dim"), soft_wrap=True)

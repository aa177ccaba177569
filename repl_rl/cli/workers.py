"""`repl-rl workers status RUN`: print the status of a run's rollout workers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from tyro.conf import Positional

from repl_rl.cli.terminal_output import make_terminal
from repl_rl.errors import ConfigError
from repl_rl.ray.remote_rollouts import LOGS, STATUS
from repl_rl.settings.argument_parser import parse


@dataclass(frozen=True)
class WorkersStatusConfig:
    """Print the rollout workers of a run with `--workers ray`: the status of each, and reasons for lost ones."""

    run: Positional[Path]
    """Run folder, such as runs/quickstart."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    action, rest = (argv[0], argv[1:]) if argv else ("", argv)
    if action in ("-h", "--help"):
        print("usage: repl-rl workers status RUN")
        return 0
    if action != "status":
        raise ConfigError("workers action", action, "choose status")
    _print_status(parse(WorkersStatusConfig, "workers status", rest).run)
    return 0


def _print_status(run: Path) -> None:
    """Print the table of workers, the lost ones, and the place of the logs."""
    file = run / STATUS
    if not file.is_file():
        remedy = "it has no fleet.json: give the folder of a run that plays, or has played, with --workers ray"
        raise ConfigError("run folder", str(run), remedy)
    said: Mapping[str, Sequence[Mapping[str, object]]] = json.loads(file.read_text(encoding="utf-8"))
    console = make_terminal()
    table = Table(title=f"{said['cluster']}: nodes of {run}, weights of policy step {said['policy_step']}")
    columns = ("name", "seat", "pid", "state", "policy_step", "rollouts", "rollouts_played", "tokens", "faults")
    for name in columns:
        table.add_column(name.replace("_", " "))
    for node in said["nodes"]:
        table.add_row(*(str(node[name]) for name in columns))
    console.print(table)
    # Workers that were lost have a reason in place of metrics.
    for lost in said["lost"]:
        console.print(f"lost: {lost['name']} at {lost['seat']}: {lost['why']}")
    console.print(f"groups begun again: {said['groups_replayed']}; logs of nodes: {run / LOGS}")

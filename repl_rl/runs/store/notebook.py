"""Export of a trajectory to a Jupyter notebook (nbformat 4.5), and import from one.

Each line is a code cell with its output. The notebook's metadata holds the exact record, as a line of JSON, and the
workspace. Only the metadata is read back. The cells are for people, and their text is escaped.
"""

import json
from dataclasses import replace
from pathlib import Path

from repl_rl.credit.credited import Credited, LineCredit
from repl_rl.errors import StoreError
from repl_rl.runs.store.records import dump, parse
from repl_rl.runs.store.text import Transition, printable, transitions
from repl_rl.tasks import Workspace

_KEY = "repl_rl"
_WORKSPACE = "repl_rl_workspace"


def write_notebook(entry: Credited, path: Path) -> None:
    """Write the trajectory as a notebook to `path`."""
    path.write_text(to_notebook(entry), encoding="utf-8")


def to_notebook(entry: Credited) -> str:
    """Return the notebook as JSON."""
    t = entry.trajectory
    answer = "none" if t.answer is None else repr(t.answer)
    outcome = "not graded" if t.outcome is None else f"{t.outcome:g}"
    head = f"trajectory {t.id}\nended: {t.stop}; outcome: {outcome}; answer: {answer}\n\n{t.prompt.text}"
    credit_L = entry.credit_L or (None,) * len(t.lines)
    # The prompt becomes a raw cell, which Jupyter does not execute.
    first: dict[str, object] = {"cell_type": "raw", "id": "prompt", "metadata": {}, "source": printable(head)}
    pairs = zip(transitions(t), credit_L, strict=True)
    setup = {_WORKSPACE: t.workspace.content.decode()} if t.workspace is not None else {}
    notebook = {
        "cells": [first, *(_cell(each, credit, number) for number, (each, credit) in enumerate(pairs, 1))],
        "metadata": {_KEY: dump(entry).decode(), **setup, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1) + "\n"


def read_notebook(path: Path) -> Credited:
    """Return the trajectory that `write_notebook` wrote; edited cells have no effect on it.

    Raises:
        StoreError: it is not a notebook, or holds no trajectory.
    """
    try:
        metadata = json.loads(path.read_text())["metadata"]
        record, setup = metadata.get(_KEY), metadata.get(_WORKSPACE)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"{path} is no notebook: {error!r}") from error
    if record is None:
        raise StoreError(f"{path} holds no trajectory; give a notebook that was exported from one")
    entry = parse(str(record).encode("utf-8", "surrogatepass"), str(path))
    # A record names its workspace only by digest; the metadata holds its content.
    if entry.trajectory.workspace is None or setup is None:
        return entry
    workspace = Workspace.read(str(setup).encode("utf-8", "surrogatepass"))
    if workspace != entry.trajectory.workspace:
        raise StoreError(f"{path}: its workspace is not the one of its trajectory; export it again")
    return replace(entry, trajectory=replace(entry.trajectory, workspace=workspace))


def _cell(each: Transition, credit: LineCredit | None, number: int) -> dict[str, object]:
    line, run = each.line, each.line.execution
    shown = printable(each.output)
    facts = {
        "status": run.status.value if run else None,
        "elapsed_s": run.elapsed_s if run else None,
        "rewards": {reward.name: reward.value for reward in line.rewards},
        "reward": credit.reward if credit else None,
        "advantage": credit.advantage if credit else None,
    }
    return {
        "cell_type": "code",
        "id": f"line-{number}",
        "execution_count": number,
        "metadata": {_KEY: facts},
        "source": printable(line.text).removesuffix("\n"),
        "outputs": [{"output_type": "stream", "name": "stdout", "text": shown}] if shown else [],
    }

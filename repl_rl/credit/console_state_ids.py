"""Names of console states, computed from the record of a rollout.

Estimators compare lines whose names are equal. The host computes the names, because output of a sandbox is untrusted.
"""

import ast
import hashlib

from repl_rl.trajectory.trajectory import Line, LineStatus, Trajectory


def compute_line_states(trajectory: Trajectory) -> tuple[str, ...]:
    """Return a name of the console state before each line, shape (L,). Equal names mean equal states.

    The host derives it from the lines that ran before, because a report of the sandbox is untrusted and would decide
    here which rollouts share a baseline. A name depends on the cells that the console received before, without their
    layout and comments. Other text of the policy around them does not count, and a cell that never compiled left no
    trace. Equal states may have different names (`x = 4` and `x = 2 + 2`). Different states never share a name, as long
    as programs are deterministic. A line that a tool executed counts with its text.
    """
    states: list[str] = []
    history = ""
    cell: list[str] = []
    # True while each line of the cell closed one physical line, so that all of them belong to this cell.
    single_lines = True
    for line in trajectory.lines:
        states.append(
            hashlib.blake2b((history + _join_cell(cell)).encode(errors="replace"), digest_size=16).hexdigest()
        )
        if line.execution is None:
            continue
        # One sampled line may close several physical lines.
        executed = _get_executed_code(line)
        cell += executed
        single_lines = single_lines and len(executed) == 1
        if line.execution.status is not LineStatus.INCOMPLETE:
            # A cell that never compiled left no trace. With several physical lines per line, an earlier one may have
            # run.
            if line.execution.status is not LineStatus.SYNTAX_ERROR or not single_lines:
                history += _canonicalize_cell(_join_cell(cell))
            cell, single_lines = [], True
    return tuple(states)


def _get_executed_code(line: Line) -> tuple[str, ...]:
    """Return the source lines that the console ran for a line, or its text if it ran elsewhere, as a tool call does."""
    assert line.execution is not None
    return line.execution.ran or (line.text.removesuffix("\n"),)


def _join_cell(cell: list[str]) -> str:
    return "".join(f"{physical}\n" for physical in cell)


def _canonicalize_cell(cell: str) -> str:
    """Return the cell without layout and comments, or the cell itself if Python cannot parse or print it here."""
    try:
        return "".join(ast.dump(statement) + "\n" for statement in ast.parse(cell).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return f"{cell!r}\n"

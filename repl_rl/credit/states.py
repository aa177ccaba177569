"""Names of the console state before each line, or of all ids before it.

The host computes them, and derives states from the lines that ran before. Reports of a sandbox are untrusted. Here they
could decide which rollouts share a baseline.
"""

import ast
import hashlib
from array import array

from repl_rl.record.trajectory import Line, LineStatus, Observed, Trajectory


def line_states(trajectory: Trajectory) -> tuple[str, ...]:
    """Return a name of the console state before each line, shape (L,). Equal names mean equal states.

    A name depends on the cells that the console received before, without their layout and comments. Other text of the
    policy around them does not count, and a cell that never compiled left no trace. Equal states may have different
    names (`x = 4` and `x = 2 + 2`). Different states never share a name, as long as programs are deterministic. A line
    that a tool executed counts with its text.
    """
    states: list[str] = []
    ran = ""
    cell: list[str] = []
    # True while each line of the cell closed one physical line, so that all of them belong to this cell.
    alone = True
    for line in trajectory.lines:
        states.append(hashlib.blake2b((ran + _joined(cell)).encode(errors="replace"), digest_size=16).hexdigest())
        if line.execution is None:
            continue
        given = _given(line)
        cell += given
        alone = alone and len(given) == 1
        if line.execution.status is not LineStatus.INCOMPLETE:
            # A cell that never compiled left no trace. With several physical lines per line, an earlier one may have
            # run.
            if line.execution.status is not LineStatus.SYNTAX_ERROR or not alone:
                ran += _canonical(_joined(cell))
            cell, alone = [], True
    return tuple(states)


def line_prefixes(trajectory: Trajectory) -> tuple[str, ...]:
    """Return a name of everything between the prompt and each line, shape (L,). Equal names mean equal ids.

    Observations count, too, because two consoles may have answered the same lines differently.
    """
    names: list[str] = []
    so_far = hashlib.blake2b(digest_size=16)
    for segment in trajectory.segments:
        for part in (segment,) if isinstance(segment, Observed) else segment.lines:
            if isinstance(part, Line):
                names.append(so_far.hexdigest())
            so_far.update(array("q", part.token_ids).tobytes())
    return tuple(names)


def _given(line: Line) -> tuple[str, ...]:
    """Return the physical lines that were executed for a line, or its text if no console executed it."""
    assert line.execution is not None
    return line.execution.ran or (line.text.removesuffix("\n"),)


def _joined(cell: list[str]) -> str:
    return "".join(f"{physical}\n" for physical in cell)


def _canonical(cell: str) -> str:
    """Return the cell without layout and comments, or the cell itself if Python cannot parse or print it here."""
    try:
        return "".join(ast.dump(statement) + "\n" for statement in ast.parse(cell).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return f"{cell!r}\n"

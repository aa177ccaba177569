"""Names of what each line starts from: the console state, or all ids before it.

They are made on the host, states from what ran before. What a sandbox says is untrusted, and would decide here who
shares a baseline.
"""

import ast
import hashlib
from array import array

from repl_rl.record.trajectory import Line, LineStatus, Observed, Trajectory


def line_states(trajectory: Trajectory) -> tuple[str, ...]:
    """A name of the console state that each line starts from, shape (L,); equal names mean equal states.

    It is made from the cells that the console was given before, without their layout and comments, and whatever the
    policy wrote around them; a cell that never compiled left no trace. So it tells more states apart than there are
    (`x = 4` and `x = 2 + 2` differ), never fewer, as long as programs are deterministic. A line that a tool executed
    counts with its text.
    """
    states: list[str] = []
    ran = ""
    cell: list[str] = []
    alone = True  # each line of the cell closed one physical line, so they are all of this one cell
    for line in trajectory.lines:
        states.append(hashlib.blake2b((ran + _joined(cell)).encode(errors="replace"), digest_size=16).hexdigest())
        if line.execution is None:
            continue
        given = _given(line)
        cell += given
        alone = alone and len(given) == 1
        if line.execution.status is not LineStatus.INCOMPLETE:
            if line.execution.status is not LineStatus.SYNTAX_ERROR or not alone:
                ran += _canonical(_joined(cell))
            cell, alone = [], True
    return tuple(states)


def line_prefixes(trajectory: Trajectory) -> tuple[str, ...]:
    """A name of all that stood between the prompt and each line, shape (L,); equal names mean equal ids.

    Observations count, too: two consoles may have answered the same lines differently.
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
    """What was executed for a line; its text, where no console did."""
    assert line.execution is not None
    return line.execution.ran or (line.text.removesuffix("\n"),)


def _joined(cell: list[str]) -> str:
    return "".join(f"{physical}\n" for physical in cell)


def _canonical(cell: str) -> str:
    """The cell without layout and comments; the cell itself where Python here cannot parse it."""
    try:
        body = ast.parse(cell).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return f"{cell!r}\n"
    return "".join(ast.dump(statement) + "\n" for statement in body)

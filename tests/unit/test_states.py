"""Names of console states: equal for equal states, made of what the console was given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.credit.console_state_ids import compute_line_states
from repl_rl.trajectory.trajectory import Execution, Line, LineEnd, LineStatus
from tests.unit.test_rewards import RAN, rollout


def written(text: str, status: LineStatus, *ran: str) -> Line:
    """A line of the console; `ran`: what it was given in the place of the line."""
    given = ran or tuple(text.split("\n")[:-1])
    return Line((5,), (-1.0,), text, LineEnd.NEWLINE, Execution(status, 0.0, ran=given))


def test_lines_start_from_equal_states_when_equal_cells_ran_before() -> None:
    a = rollout(written("x = 1\n", LineStatus.OK), written("x\n", LineStatus.OK), written("x\n", LineStatus.OK))
    b = rollout(
        written("x=1  # one\n", LineStatus.OK), written("x +\n", LineStatus.SYNTAX_ERROR), written("y\n", LineStatus.OK)
    )
    assert compute_line_states(a)[0] == compute_line_states(b)[0]
    assert compute_line_states(a)[1] == compute_line_states(b)[1] == compute_line_states(b)[2]
    assert compute_line_states(a)[2] != compute_line_states(a)[1]


def test_a_line_inside_a_cell_starts_from_the_open_cell() -> None:
    lines = [
        written("if 1:\n", LineStatus.INCOMPLETE),
        written(" y = 2\n", LineStatus.INCOMPLETE),
        written("\n", LineStatus.OK),
    ]
    same = compute_line_states(rollout(*lines, written("y\n", LineStatus.OK)))
    flat = compute_line_states(rollout(written("if 1:   y = 2\n", LineStatus.OK), written("y\n", LineStatus.OK)))
    assert same[3] == flat[1]
    assert len(set(same)) == 4


def test_states_are_named_by_what_ran_whatever_was_written_around_it() -> None:
    code = "exec(compile('x = 1', '<block>', 'exec'))"
    a = rollout(written("Let me see.\n", LineStatus.OK, code), written("x\n", LineStatus.OK))
    b = rollout(written("Then x is 1.\n", LineStatus.OK, code), written("x\n", LineStatus.OK))
    c = rollout(written("Let me see.\n", LineStatus.OK, code.replace("1", "2")), written("x\n", LineStatus.OK))
    assert compute_line_states(a)[1] == compute_line_states(b)[1] != compute_line_states(c)[1]


def test_a_cell_that_ran_leaves_its_trace_although_the_next_one_of_its_line_did_not_compile() -> None:
    failed = [written(text, LineStatus.SYNTAX_ERROR) for text in ("x = 1\nx +\n", "x +\n")]
    first, second = (compute_line_states(rollout(line, written("x\n", LineStatus.OK)))[1] for line in failed)
    assert first != second


def test_lines_that_tools_executed_are_told_apart_by_their_text() -> None:
    asked = [Line((5,), (-1.0,), text, LineEnd.MATCH, Execution(LineStatus.OK, 0.0)) for text in ("f(1)", "f(2)")]
    states = [compute_line_states(rollout(line, written("x\n", LineStatus.OK)))[1] for line in asked]
    assert states[0] != states[1]


@given(st.lists(st.tuples(st.text(max_size=8), st.sampled_from(RAN)), max_size=4))
def test_any_text_has_a_state(cells: list[tuple[str, LineStatus]]) -> None:
    t = rollout(*(written(text + "\n", status) for text, status in cells))
    assert len(compute_line_states(t)) == len(t.lines)


HARD_CELLS = ("x = " + "-" * 100_000 + "1", "x = " + "+".join("1" * 3000), "x = 0x" + "f" * 9000, "x = '\0'")


@pytest.mark.parametrize("cell", HARD_CELLS)
def test_a_cell_that_python_can_hardly_parse_or_print_has_a_state(cell: str) -> None:
    a, b = (
        rollout(written(text + "\n", LineStatus.OK), written("x\n", LineStatus.OK))
        for text in (cell, cell + "  # other")
    )
    assert compute_line_states(a)[0] == compute_line_states(b)[0]
    assert compute_line_states(a)[1] != compute_line_states(a)[0]

"""The console's pure logic against `code.InteractiveConsole`, the reference."""

import code
import contextlib
import io
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.trajectory.console_text import CellBuffer, CellStatus, LineBuffer, choose_prompt

_LINES = st.sampled_from(
    ["", "  ", "# note", "x = 1", "if x:", "    x", "    y = (", "1)", "(", ")", "'''", "for i in []:", "@f", "x ="]
)


def _agree(lines: Sequence[str]) -> None:
    console, buffer = code.InteractiveConsole({}), CellBuffer()
    for line in lines:
        verdict = buffer.add(line)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            more = console.push(line)
        assert (verdict is CellStatus.INCOMPLETE) == more
        if not more:
            buffer.reset()


@given(st.lists(_LINES, max_size=8))
def test_the_host_says_incomplete_exactly_when_the_reference_does(lines: list[str]) -> None:
    _agree(lines)


def test_a_future_statement_counts_for_the_cells_after_it() -> None:
    _agree(["x = 1 <> (", "from __future__ import barry_as_FLUFL", "x = 1 <> (", "2)", "x = 1 != ("])


def test_comments_and_blank_lines_at_the_start_of_a_cell_are_void() -> None:
    assert [CellBuffer().add(line) for line in ("", "   ", "# why", "  # why")] == [CellStatus.VOID] * 4


def test_a_blank_line_inside_a_block_is_not_void() -> None:
    buffer = CellBuffer()
    assert buffer.add("if 1:") is CellStatus.INCOMPLETE
    assert buffer.add("    1") is CellStatus.INCOMPLETE
    assert buffer.add("") is CellStatus.SEND
    assert buffer.source == "if 1:\n    1\n"


def test_without_the_right_to_decide_every_line_is_sent() -> None:
    buffer = CellBuffer(decide=False)
    assert buffer.add("# note") is CellStatus.SEND
    assert buffer.add("if 1:") is CellStatus.SEND


def test_a_huge_cell_is_left_to_the_sandbox() -> None:
    assert CellBuffer().add("(" * 10_000) is CellStatus.SEND


@pytest.mark.parametrize("first", ["x = (", "x = (" + "1," * 3000])
def test_a_cell_of_many_short_lines_is_left_to_the_sandbox(first: str) -> None:
    buffer = CellBuffer()
    verdicts = [buffer.add(line) for line in (first, *[""] * 4000)]
    decided = verdicts.count(CellStatus.INCOMPLETE)
    # Each line parses the whole cell again.
    assert 30 < decided < 1000
    assert set(verdicts[decided:]) == {CellStatus.SEND}
    buffer.reset()
    assert buffer.add("x = (") is CellStatus.INCOMPLETE


@pytest.mark.parametrize("source", ["\0", "x = 1\r", "'\ud800'", "9" * 5000])
def test_odd_sources_never_raise_on_the_host(source: str) -> None:
    assert CellBuffer().add(source) in CellStatus


@given(st.lists(st.text(st.sampled_from("ab\n\r\x0c\x85"))))
def test_lines_are_cut_at_newlines_and_at_nothing_else(pieces: list[str]) -> None:
    buffer = LineBuffer()
    closed = [line for piece in (*pieces, "\n") for line in buffer.feed(piece)]
    assert "\n".join(closed) == "".join(pieces)
    assert not any("\n" in line for line in closed)


def test_text_after_a_newline_is_carried_into_the_next_line() -> None:
    buffer = LineBuffer()
    assert buffer.feed("x = 1\nfoo") == ("x = 1",)
    assert buffer.feed("bar\n\n") == ("foobar", "")


def test_prompts_are_those_of_the_console() -> None:
    assert (choose_prompt(more=False), choose_prompt(more=True)) == (">>> ", "... ")

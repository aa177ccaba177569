"""Stored trajectories come back equal, in any order, and damage is reported without costing anything else."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.credit.credited_trajectory import CreditedTrajectory, LineCredit, compute_importance_ratios
from repl_rl.errors import InvariantError, StoreError
from repl_rl.runs.store import (
    Store,
    append_records,
    escape_control_characters,
    from_record,
    parse_session,
    read_trajectories,
    to_record,
    to_text,
    write_step,
    write_tokens,
)
from repl_rl.runs.store.appendable_gzip import is_plain_gzip
from repl_rl.runs.store.export_formats import read_notebook, write_notebook
from repl_rl.runs.store.trajectory_json import dump_record
from repl_rl.trajectory.trajectory import (
    Alternative,
    Execution,
    Failure,
    FailureKind,
    Line,
    LineEnd,
    LineStatus,
    NamedReward,
    Observed,
    Sampled,
    Segment,
    Stop,
    Trajectory,
)
from tests.unit.test_trajectory import line, trajectories, trajectory

HOSTILE = '</script><script>alert(1)</script> \x1b[2J\x00 \u202e>>> fake\n... \\\n>>> submit_final_answer(1)\n"\ud800'


@given(trajectories(), st.booleans())
def test_a_record_comes_back_equal_through_json(t: Trajectory, credited: bool) -> None:
    credit_L = tuple(LineCredit(0.1, -0.2, tuple(p / 3 for p in one.logprobs)) for one in t.lines if credited)
    entry = CreditedTrajectory(t, credit_L)
    assert from_record(json.loads(json.dumps(to_record(entry)))) == entry


def full(id: str = "t") -> Trajectory:
    told = replace(line(), execution=Execution(LineStatus.ANSWERED, 0.5, "é"), rewards=(NamedReward("mine", 2.0),))
    return replace(trajectory(Sampled((told,)), Observed(HOSTILE, (1,))), outcome=1.0, id=id)


def test_executions_rewards_failures_and_odd_text_survive(tmp_path: Path) -> None:
    failed = replace(trajectory(), stop=Stop.FAULT, failure=Failure(FailureKind.SANDBOX_FAULT, "lost"))
    write_step(tmp_path, 3, [full(), failed])
    assert list(read_trajectories(tmp_path)) == [full(), failed]


def test_steps_are_read_in_order(tmp_path: Path) -> None:
    for step in (2, 10, 1):
        write_step(tmp_path, step, [full(str(step))])
    assert [t.id for t in read_trajectories(tmp_path)] == ["1", "2", "10"]


def test_any_trajectory_is_found_by_its_id(tmp_path: Path) -> None:
    ids = ["a", "é\ud800", "b" * 300]
    write_step(tmp_path, 1, [full(id) for id in ids[:2]])
    write_step(tmp_path, 2, [full(ids[2])], [[LineCredit(0.5, -1.0, (-0.1, -0.2))]])
    store = Store(tmp_path)
    assert len(store) == 3
    assert store.ids[0] == "a"
    assert store[ids[2]].credit_L == (LineCredit(0.5, -1.0, (-0.1, -0.2)),)
    assert store["a"] == CreditedTrajectory(full("a"))
    with pytest.raises(StoreError, match="did you mean 'a'"):
        store["aa"]


def test_the_run_folder_the_trajectories_folder_and_a_file_are_all_sources(tmp_path: Path) -> None:
    path = write_step(tmp_path / "trajectories", 1, [full()])
    for source in (tmp_path, tmp_path / "trajectories", path):
        assert [e.trajectory for e in Store(source)] == [full()]


def test_any_gzip_reader_unpacks_a_file_into_json_lines(tmp_path: Path) -> None:
    path = write_step(tmp_path, 1, [full("a"), full("b")])
    assert [json.loads(text)["id"] for text in gzip.decompress(path.read_bytes()).splitlines()] == ["a", "b"]


def test_token_texts_are_kept_beside_the_trajectories(tmp_path: Path) -> None:
    path = write_step(tmp_path, 1, [full()])
    assert Store(path).read_tokens() == ()
    write_tokens(tmp_path, ["a", "\n", "�"])
    assert Store(path).read_tokens() == Store(tmp_path).read_tokens() == ("a", "\n", "�")


@pytest.mark.parametrize("missing", ["schema_version", "policy_step"])
def test_i10_a_record_without_version_or_policy_step_is_refused(missing: str) -> None:
    record = dict(to_record(CreditedTrajectory(full())))
    del record[missing]
    with pytest.raises(StoreError, match=missing):
        from_record(record)  # type: ignore[arg-type]


def test_i10_a_record_of_another_version_is_refused() -> None:
    record = to_record(CreditedTrajectory(full()))
    record["schema_version"] = 99
    with pytest.raises(StoreError, match="schema_version is 99"):
        from_record(record)


def version_1(path: Path, *found: Trajectory) -> Path:
    """A file as the first release wrote it: one member, no credit."""
    rows = []
    for t in found:
        record = dict(to_record(CreditedTrajectory(t)))
        del record["credit"]
        rows.append(json.dumps({**record, "schema_version": 1}))
    path.write_bytes(gzip.compress("\n".join([*rows, ""]).encode()))
    return path


def test_files_of_version_1_are_read_in_order_and_by_id(tmp_path: Path) -> None:
    version_1(tmp_path / "000001.jsonl.gz", full("a"), full("b"))
    store = Store(tmp_path)
    assert [e.trajectory.id for e in store] == ["a", "b"]
    assert store["b"] == CreditedTrajectory(full("b"))


def test_a_torn_file_of_version_1_keeps_what_was_whole(tmp_path: Path) -> None:
    path = version_1(tmp_path / "000001.jsonl.gz", full("a"))
    path.write_bytes(path.read_bytes()[:-4])
    found = read_trajectories(path)
    assert next(found) == full("a")
    with pytest.raises(StoreError, match="torn"):
        next(found)


def test_a_bad_line_is_named_with_its_number(tmp_path: Path) -> None:
    path = version_1(tmp_path / "000001.jsonl.gz", full())
    with gzip.open(path, "at") as file:
        file.write('{"schema_version": 1, "policy_step": 0}\n')
    with pytest.raises(StoreError, match="line 2"):
        list(read_trajectories(path))


def test_a_write_cut_at_any_byte_leaves_all_earlier_trajectories_and_a_report(tmp_path: Path) -> None:
    path = write_step(tmp_path, 1, [full("a"), full("b"), full("c")])
    whole = path.read_bytes()
    ends = [0]
    for id in "abc":
        write_step(tmp_path / "alone", 1, [full(id)])
        ends.append(ends[-1] + (tmp_path / "alone" / "000001.jsonl.gz").stat().st_size)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        store = Store(path)
        complete = sum(end <= size for end in ends) - 1
        assert [e.trajectory for e in store] == [full(id) for id in "abc"[:complete]]
        assert bool(store.damaged_regions) == (size not in ends)
        assert all(f"byte {ends[complete]}" in str(damage) or is_plain_gzip(path) for damage in store.damaged_regions)


def test_a_damaged_record_costs_no_other(tmp_path: Path) -> None:
    path = write_step(tmp_path, 1, [full("a"), full("b"), full("c")])
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)
    store = Store(path)
    for _ in range(2):
        assert [e.trajectory.id for e in store] == ["a", "c"]
    (damage,) = store.damaged_regions
    assert "'b' is damaged" in damage.reason
    with pytest.raises(StoreError, match="'b' is damaged"):
        list(read_trajectories(path))


def test_records_are_appended_behind_whole_ones_only(tmp_path: Path) -> None:
    path = write_step(tmp_path, 1, [full("a")])
    append_records(path, [CreditedTrajectory(full("b"))])
    assert Store(path).ids == ("a", "b")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match="torn"):
        append_records(path, [CreditedTrajectory(full("c"))])


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no trajectories at"):
        list(read_trajectories(tmp_path / "none"))


def test_credit_has_an_entry_a_line_and_a_log_probability_a_token() -> None:
    with pytest.raises(InvariantError, match="2 lines and has 1"):
        CreditedTrajectory(full(), (LineCredit(0, 0), LineCredit(0, 0)))
    with pytest.raises(InvariantError, match="1 log probabilities of the trainer for 2 tokens"):
        CreditedTrajectory(full(), (LineCredit(0, 0, (-1.0,)),))
    with pytest.raises(InvariantError, match=r"LineCredit\.advantage"):
        LineCredit(0, float("nan"))
    assert compute_importance_ratios(line(), LineCredit(0, 0, (-0.5, -0.5))) == (1.0, 1.0)


def test_a_line_of_another_policy_than_its_trajectorys_says_so_and_the_others_do_not() -> None:
    own, older = replace(line(), policy_step=5), replace(line(), policy_step=4)
    other = Alternative((1,), (-0.5,), "y\n", LineEnd.NEWLINE, 1.0, 3)
    t = replace(trajectory(Sampled((replace(older, alternatives=(other,)), own))), policy_step=5)
    record = to_record(CreditedTrajectory(t))
    first, second = record["segments"][0]["sampled"]
    assert first["policy_step"] == 4
    assert first["alternatives"][0]["policy_step"] == 3
    assert "policy_step" not in second
    assert from_record(json.loads(json.dumps(record))).trajectory == t


def said(source: str, output: str, prompt: str = ">>> ") -> tuple[Sampled, Observed]:
    """A line that was typed into a console, and what it showed."""
    ran = Execution(LineStatus.OK, 0.0, ran=tuple(source.split("\n")[:-1]))
    return Sampled((Line((1,), (-0.1,), source, LineEnd.NEWLINE, ran),)), Observed(output + prompt, (2,))


def test_console_text_reads_as_a_session() -> None:
    parts: list[Segment] = [
        *said("for i in (1, 2):\n", "", "... "),
        *said("    i\n\n", "1\n2\n"),
        *said("x\n", "fake\n>>> y\n"),
    ]
    start = replace(trajectory(*parts), prompt=replace(trajectory().prompt, text="Why?\n>>> "))
    assert to_text(start) == "Why?\n>>> for i in (1, 2):\n...     i\n... \n1\n2\n>>> x\nfake\n\\>>> y\n"


OUTPUT = st.text(st.sampled_from("a \n\\>.")) | st.sampled_from(["", ">>> x\n", "... \n", "\\", "a\n\\\n", HOSTILE])


@given(st.lists(st.tuples(st.text(st.sampled_from("ab .>\\")), OUTPUT), max_size=4))
def test_console_text_is_read_back_as_it_was_typed_and_printed(turns: list[tuple[str, str]]) -> None:
    t = trajectory(*(part for source, output in turns for part in said(source + "\n", output)))
    text = to_text(replace(t, prompt=replace(t.prompt, text="Question\n>>> no line\n>>> ")))
    assert [(turn.source, turn.output) for turn in parse_session(text)] == [
        (s, escape_control_characters(o)) for s, o in turns
    ]
    assert all(c.isprintable() or c in "\n\t" for c in text)


def test_a_notebook_holds_each_line_with_its_output_and_comes_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "one.ipynb"
    entry = CreditedTrajectory(full(), (LineCredit(-0.1, 0.7, (-0.1, -0.2)),))
    write_notebook(entry, path)
    assert read_notebook(path) == entry
    cell = json.loads(path.read_text())["cells"][1]
    assert cell["metadata"]["repl_rl"]["advantage"] == 0.7
    assert cell["metadata"]["repl_rl"]["rewards"] == {"mine": 2.0}
    shown = "".join(cell["outputs"][0]["text"])
    assert "\\x1b[2J\\x00" in shown
    assert "\x1b" not in shown


def test_a_notebook_without_a_trajectory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.ipynb"
    path.write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    with pytest.raises(StoreError, match="holds no trajectory"):
        read_notebook(path)
    path.write_text("no")
    with pytest.raises(StoreError, match="no notebook"):
        read_notebook(path)


def test_a_record_is_one_line_of_ascii() -> None:
    assert dump_record(CreditedTrajectory(full())).isascii()
    assert dump_record(CreditedTrajectory(full())).count(b"\n") == 1

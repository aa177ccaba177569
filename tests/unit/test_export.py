"""`repl-rl export`: a table has what other trainers read, and trajectories come back out of it as they were."""

import importlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict, load_from_disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from repl_rl.cli import main
from repl_rl.credit.credited_trajectory import CreditedTrajectory, LineCredit
from repl_rl.errors import StoreError
from repl_rl.runs.store import Store, write_step
from repl_rl.runs.store.export_formats import COLUMNS, build_table_row, open_table, parse_table_row
from repl_rl.tasks import Workspace
from repl_rl.trajectory.trajectory import Failure, FailureKind, Sampled, Stop, Trajectory
from repl_rl.utils.file_lock import OWNER
from tests.support.documents import PAGES, blocks
from tests.support.run_folders import calling, credit, rollout, run_folder
from tests.unit.test_store import HOSTILE, full
from tests.unit.test_trajectory import trajectories, trajectory

PLACES = ("out.parquet", "folder")


def shapes() -> list[CreditedTrajectory]:
    """Trajectories of every kind that a store may hold."""
    failed = replace(trajectory(), id="failed", stop=Stop.FAULT, failure=Failure(FailureKind.SANDBOX_FAULT, HOSTILE))
    given = replace(rollout(1, "given", 1), id="given", workspace=Workspace(values={"limit": 40}))
    empty = replace(trajectory(), id="nothing was sampled")
    learned = rollout(2, "learned", 0)
    return [
        CreditedTrajectory(full("\ud800")),
        *map(CreditedTrajectory, (failed, given, empty, calling(learned))),
        CreditedTrajectory(learned, credit(learned)),
    ]


@given(trajectories(), st.booleans())
def test_a_trajectory_comes_back_equal_out_of_its_row(t: Trajectory, credited: bool) -> None:
    credit_L = tuple(LineCredit(0.1, -0.2, tuple(p / 3 for p in one.logprobs)) for one in t.lines if credited)
    entry = CreditedTrajectory(t, credit_L)
    assert parse_table_row(build_table_row(entry), "row") == entry


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(trajectories(), min_size=1, max_size=4), st.sampled_from(PLACES))
def test_whatever_is_exported_comes_back_equal_from_the_disk(
    tmp_path: Path, found: list[Trajectory], place: str
) -> None:
    named = [replace(t, id=str(number)) for number, t in enumerate(found)]
    write_step(tmp_path / "trajectories", 1, named)
    out, back = tmp_path / place, tmp_path / "back" / "1.jsonl.gz"
    assert main(["export", str(tmp_path), "--out", str(out), "--overwrite"]) == 0
    assert main(["export", str(out), "--out", str(back), "--overwrite"]) == 0
    assert [entry.trajectory for entry in Store(back)] == named


@pytest.mark.parametrize("place", PLACES)
def test_failures_calls_credit_workspaces_and_odd_text_come_back_too(tmp_path: Path, place: str) -> None:
    run, out, back = tmp_path / "run", tmp_path / place, tmp_path / "back" / "1.jsonl.gz"
    entries = shapes()
    write_step(run / "trajectories", 1, [e.trajectory for e in entries], [e.credit_L for e in entries])
    assert main(["export", str(run), "--out", str(out)]) == 0
    assert main(["export", str(out), "--out", str(back)]) == 0
    assert list(Store(back)) == entries
    began = next(e.trajectory.workspace for e in Store(back) if e.trajectory.id == "given")
    assert began is not None
    assert began.content == Workspace(values={"limit": 40}).content


@pytest.mark.parametrize("place", ["t[1].parquet", "a::b*.parquet", "x[1]/t?.parquet", "t[1]", "a::b*"])
def test_characters_of_a_path_that_mean_something_to_the_library_are_taken_as_they_are(
    tmp_path: Path, place: str
) -> None:
    run, out, back = tmp_path / "run", tmp_path / "o::[u]*" / place, tmp_path / "back[1]" / "1.jsonl.gz"
    write_step(run / "trajectories", 1, [replace(trajectory(), id="one")])
    assert main(["export", str(run), "--out", str(out)]) == 0
    assert main(["export", str(out), "--out", str(back)]) == 0
    assert [entry.trajectory.id for entry in Store(back)] == ["one"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["back[1]", "o::[u]*", "run"]
    assert os.listdir(out.parent) == [out.name]


@pytest.mark.parametrize("place", ["link.parquet", "link.jsonl.gz"])
def test_a_link_to_a_file_is_followed_and_a_dangling_one_makes_its_target(tmp_path: Path, place: str) -> None:
    run, table = tmp_path / "run", tmp_path / "table.parquet"
    write_step(run / "trajectories", 1, [replace(trajectory(), id="one")])
    assert main(["export", str(run), "--out", str(table)]) == 0
    source = run if place.endswith(".parquet") else table
    target, link = tmp_path / "kept" / place, tmp_path / place
    link.symlink_to(target)
    for flags in ([], ["--overwrite"]):
        assert main(["export", str(source), "--out", str(link), *flags]) == 0
        assert (link.is_symlink(), target.is_symlink()) == (True, False)
        assert os.listdir(target.parent) == [target.name]


@pytest.mark.parametrize("place", ["pipe.parquet", "pipe.jsonl.gz"])
def test_a_pipe_gets_a_table_and_refuses_trajectories_and_stays_a_pipe(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, table, pipe = tmp_path / "run", tmp_path / "table.parquet", tmp_path / place
    write_step(run / "trajectories", 1, [replace(trajectory(), id="one")])
    assert main(["export", str(run), "--out", str(table)]) == 0
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    if place.endswith(".parquet"):
        assert main(["export", str(run), "--out", str(pipe), "--overwrite"]) == 0
        assert os.read(reader, 1 << 20) == table.read_bytes()
    else:
        assert main(["export", str(table), "--out", str(pipe), "--overwrite"]) == 2
        assert "workspaces are stored next to trajectories; name a file" in capsys.readouterr().err
        assert os.read(reader, 1) == b""
    os.close(reader)
    assert pipe.is_fifo()


def rows(place: Path) -> Dataset:
    return Dataset.from_parquet(str(place)) if place.suffix == ".parquet" else load_from_disk(str(place))


@pytest.mark.parametrize("place", PLACES)
def test_another_trainer_finds_every_token_with_its_mask_log_probability_and_advantage(
    tmp_path: Path, place: str
) -> None:
    run, out = run_folder(tmp_path / "run"), tmp_path / place
    assert main(["export", str(run), "--out", str(out)]) == 0
    entries = list(Store(run))
    assert len(rows(out)) == len(entries)
    for row, entry in zip(rows(out), entries, strict=True):
        t = entry.trajectory
        assert (row["id"], row["outcome"], row["prompt_ids"]) == (t.id, t.outcome, list(t.prompt.token_ids))
        told = [row[name] for name in ("completion_ids", "loss_mask", "logprobs", "advantages", "lines")]
        at = 0
        for token, mask, logprob, advantage, line in zip(*told, strict=True):
            assert token == t.completion_ids[at]
            if mask:
                one, number = t.lines[line], at - row["lines"].index(line)
                assert (token, logprob) == (one.token_ids[number], one.logprobs[number])
                assert advantage == entry.credit_L[line].advantage
                assert row["line_statuses"][line] == (one.execution.status if one.execution else None)
            else:
                assert (line, logprob, advantage) == (-1, 0.0, 0.0)
            at += 1
        assert at == len(t.completion_ids)
        assert sum(row["loss_mask"]) == sum(len(s.token_ids) for s in t.segments if isinstance(s, Sampled))


def test_rows_may_be_chosen_and_columns_of_ones_own_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out, back = run_folder(tmp_path / "run"), tmp_path / "one.parquet", tmp_path / "two.jsonl.gz"
    assert main(["export", str(run), "--out", str(tmp_path / "table")]) == 0
    table = rows(tmp_path / "table").filter(lambda row: row["solved"]).remove_columns(["prompt", "advantages"])
    table.add_column("mine", [1] * len(table)).to_parquet(out)
    assert main(["export", str(out), "--out", str(back)]) == 0
    assert [e for e in Store(run) if e.trajectory.solved] == list(Store(back))
    assert "column 'mine' is no part of a trajectory" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in COLUMNS if name not in ("record", "workspace")])
def test_a_changed_column_is_refused_and_never_passed_over(name: str) -> None:
    row = {**build_table_row(CreditedTrajectory(full())), name: ["other"]}
    with pytest.raises(StoreError, match=rf"row 3: column '{name}' is \['other'\], its record has .*not changed"):
        parse_table_row(row, "table, row 3")


def _other_workspace(row: dict[str, object]) -> None:
    row["workspace"] = Workspace(values={"limit": 41}).content.decode()


def _no_workspace(row: dict[str, object]) -> None:
    del row["workspace"]


@pytest.mark.parametrize(
    ("damage", "told"),
    [(_other_workspace, "workspace is not the one"), (_no_workspace, "was not stored with its trajectory")],
)
def test_a_row_without_its_workspace_or_with_another_is_refused(
    damage: Callable[[dict[str, object]], None], told: str
) -> None:
    row: dict[str, object] = dict(build_table_row(shapes()[2]))
    damage(row)
    with pytest.raises(StoreError, match=told):
        parse_table_row(row, "row 1")


def _parts(folder: Path) -> Path:
    DatasetDict({"train": Dataset.from_dict({"a": [1]})}).save_to_disk(str(folder / "parts"))
    return folder / "parts"


def _foreign(folder: Path) -> Path:
    Dataset.from_dict({"text": ["a"]}).to_parquet(folder / "foreign.parquet")
    return folder / "foreign.parquet"


def _broken(folder: Path) -> Path:
    (folder / "broken.parquet").write_bytes(b"PAR1")
    return folder / "broken.parquet"


def _no_run(folder: Path) -> Path:
    return folder / "nowhere"


def _empty(folder: Path) -> Path:
    (folder / "empty" / "trajectories").mkdir(parents=True)
    return folder / "empty"


@pytest.mark.parametrize(
    ("source", "out", "told"),
    [
        (_parts, "back.jsonl.gz", "has the parts train; give the folder of one of them"),
        (_foreign, "back.jsonl.gz", "row 1: it has no column 'record'"),
        (_broken, "back.jsonl.gz", "cannot be read as a table"),
        (_no_run, "out.parquet", "no trajectories at"),
        (_empty, "out.parquet", "it has no trajectories"),
        (_foreign, "out.parquet", "let it end in .jsonl.gz"),
        (run_folder, "out.jsonl.gz", "trajectories become a table"),
        (run_folder, ".", "it is there already"),
    ],
)
def test_what_cannot_be_exported_is_told_and_nothing_is_left_behind(
    source: Callable[[Path], Path], out: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = source(tmp_path / "given") if source is run_folder else source(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["export", str(given), "--out", str(tmp_path / out)]) == 2
    assert told in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_the_python_of_the_page_reads_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    entries = list(Store(run_folder(tmp_path / "run")))
    assert main(["export", "run", "--out", "runs/table"]) == 0
    (source,) = blocks("python", "docs/export.md")
    exec(source, {})
    t = entries[0].trajectory
    assert f"{t.id} {t.outcome} {t.sampled_tokens} tokens of the policy's own" in capsys.readouterr().out


def test_the_page_has_the_columns_of_the_code() -> None:
    table = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", PAGES["docs/export.md"], re.MULTILINE)
    assert table == [(name, column.kind, column.description) for name, column in COLUMNS.items()]


@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_table_of_ours_is_not_replaced(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_step(tmp_path / "run" / "trajectories", 1, [replace(trajectory(), id="one")])
    out, back = tmp_path / place, tmp_path / "back.jsonl.gz"
    command = ["export", str(tmp_path / "run"), "--out", str(out), "--overwrite"]
    theirs = Dataset.from_dict({"text": ["years of work"]})
    if out.suffix:
        theirs.to_parquet(out)
    else:
        theirs.save_to_disk(out)
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "another file is there" in told or "`repl-rl export` did not make it" in told
    found = Dataset.from_parquet(str(out)) if out.suffix else load_from_disk(out)
    assert found["text"][0] == "years of work"
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    assert main(command) == 0
    if out.is_dir():
        (out / OWNER).unlink()  # as the release before wrote it
    assert main(command) == 0
    back.write_bytes(b"mine")
    assert main(["export", str(out), "--out", str(back), "--overwrite"]) == 2
    assert back.read_bytes() == b"mine"


def test_a_parquet_table_is_read_only_as_far_as_its_size_on_disk_explains(tmp_path: Path) -> None:
    pa, pq = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    played = rollout(0, "t", 0)
    entry = CreditedTrajectory(replace(played, prompt=replace(played.prompt, text="x" * (4 << 20))), ())
    rows = pa.table({name: [cell] * 10 for name, cell in build_table_row(entry).items()})
    # A dictionary holds the texts of all rows once.
    pq.write_table(rows, tmp_path / "t.parquet", dictionary_pagesize_limit=1 << 28)
    with open_table(tmp_path / "t.parquet") as table, pytest.raises(StoreError, match="it unpacks to more than"):
        assert table.row_count == len([*table.entries])


def test_a_parquet_table_that_unpacks_to_too_much_is_refused_before_a_row_is_read(tmp_path: Path) -> None:
    Dataset.from_dict({"record": [""] * 3_000_000}).to_parquet(str(tmp_path / "t.parquet"))
    with (
        pytest.raises(StoreError, match="cannot be read as a table: it unpacks to more than"),
        open_table(tmp_path / "t.parquet"),
    ):
        raise AssertionError("it was opened")

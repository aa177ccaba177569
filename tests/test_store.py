"""Stored trajectories come back equal, and damage is reported."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from repl_rl.errors import StoreError
from repl_rl.store import from_record, read, to_record, write_step
from repl_rl.trajectory import Execution, Failure, LineStatus, NamedReward, Observed, Sampled, Stop, Trajectory
from tests.test_trajectory import line, trajectories, trajectory


@given(trajectories())
def test_a_record_comes_back_equal_through_json(t: Trajectory) -> None:
    assert from_record(json.loads(json.dumps(to_record(t)))) == t


def full() -> Trajectory:
    told = replace(line(), execution=Execution(LineStatus.ANSWERED, 0.5, "é"), rewards=(NamedReward("mine", 2.0),))
    return replace(trajectory(Sampled((told,)), Observed("\ud800", (1,))), outcome=1.0)


def test_executions_rewards_failures_and_odd_text_survive(tmp_path: Path) -> None:
    failed = replace(trajectory(), stop=Stop.FAULT, failure=Failure("SandboxFault", "lost"))
    write_step(tmp_path, 3, [full(), failed])
    assert list(read(tmp_path)) == [full(), failed]


def test_steps_are_read_in_order(tmp_path: Path) -> None:
    for step in (2, 10, 1):
        write_step(tmp_path, step, [replace(full(), id=str(step))])
    assert [t.id for t in read(tmp_path)] == ["1", "2", "10"]


@pytest.mark.parametrize("missing", ["schema_version", "policy_step"])
def test_i10_a_record_without_version_or_policy_step_is_refused(missing: str) -> None:
    record = dict(to_record(full()))
    del record[missing]
    with pytest.raises(StoreError, match=missing):
        from_record(record)  # type: ignore[arg-type]


def test_i10_a_record_of_another_version_is_refused() -> None:
    record = to_record(full())
    record["schema_version"] = 99
    with pytest.raises(StoreError, match="schema_version is 99"):
        from_record(record)


def test_a_bad_line_is_named_with_its_number(tmp_path: Path) -> None:
    path = write_step(tmp_path, 1, [full()])
    with gzip.open(path, "at") as file:
        file.write('{"schema_version": 1, "policy_step": 0}\n')
    with pytest.raises(StoreError, match="line 2"):
        list(read(path))


def test_a_torn_file_is_named_and_the_earlier_ones_stay_readable(tmp_path: Path) -> None:
    write_step(tmp_path, 1, [full()])
    path = write_step(tmp_path, 2, [full()] * 5)
    path.write_bytes(path.read_bytes()[:-12])
    found = read(tmp_path)
    assert next(found) == full()
    with pytest.raises(StoreError, match=path.name):
        list(found)


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no trajectories at"):
        list(read(tmp_path / "none"))

"""A harness asks a server and `repl-rl eval` plays the same problems: they come to one score."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.serving.inspect_ai import PAGE, Row, block, measure, rows, write_problems

ENGINE = ("--engine", "transformers", "--rollout.max-lines", "6")


@pytest.mark.heavy
@pytest.mark.skipif(find_spec("inspect_ai") is None, reason="inspect_ai is not installed")
@pytest.mark.parametrize("gsm8k", [True, False])
def test_the_harness_of_the_page_and_eval_say_the_same_of_the_same_problems(tmp_path: Path, gsm8k: bool) -> None:
    sums = [{"question": f"What is {n} * 7 + 12?", "answer": f"Seven times.\n#### {n * 7 + 12}"} for n in range(3, 9)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    row = measure("some", 6, str(tmp_path / "sums.jsonl") if gsm8k else "", ENGINE)
    assert row.problems == 6
    assert row.equal
    assert row.agreed >= 5


def test_problems_of_gsm8k_and_of_the_bundled_families_are_written_as_both_sides_read_them(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"question": "How many?", "answer": "Two.\n#### 2"}) + "\n")
    write_problems(str(tmp_path / "gsm8k.jsonl"), 5, tmp_path / "a.jsonl")
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == [
        {"id": "0", "question": "How many?", "answer": "2", "judge": "numeric"}
    ]
    write_problems("", 5, tmp_path / "b.jsonl")
    assert len({json.loads(line)["question"] for line in (tmp_path / "b.jsonl").read_text().splitlines()}) == 5


def of(harness: int, ours: int) -> Row:
    return Row("some", "policy", "harness 1", 50, harness, ours, 40)


def test_scores_are_equal_where_one_lies_within_the_interval_of_the_other() -> None:
    assert of(40, 41).equal
    assert not of(20, 41).equal


def test_the_table_of_the_page_is_the_one_of_its_figures_with_equal_scores() -> None:
    measured = rows()
    assert PAGE.text == block(measured)
    assert {row.problems for row in measured} == {50}
    assert all(row.equal for row in measured)
    assert any(row.eval > 25 for row in measured), "a policy that solves nothing says little"

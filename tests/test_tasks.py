"""Promises of `repl_rl.tasks`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repl_rl.errors import ConfigError
from repl_rl.tasks import EASY, FAMILIES, HARD, Split, generate, load_tasks, split_of

ALL = (*EASY, *HARD)


def write(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_importing_tasks_and_judges_needs_no_torch() -> None:
    code = "import sys, repl_rl.tasks, repl_rl.judges; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@settings(deadline=None, max_examples=25)
@given(seeds=st.tuples(st.integers(0, 2**31), st.integers(0, 2**31)))
def test_train_and_held_out_never_share_a_question_whatever_the_seeds(seeds: tuple[int, int]) -> None:
    train = {task.question for task in generate(ALL, "train", 40, seeds[0])}
    held_out = {task.question for task in generate(ALL, "held_out", 40, seeds[1])}
    assert not train & held_out
    assert {split_of(q) for q in train} == {Split.TRAIN}
    assert {split_of(q) for q in held_out} == {Split.HELD_OUT}


def test_the_split_is_stable_and_holds_out_about_a_fifth() -> None:
    assert split_of("Compute 1 + 2.") is Split.TRAIN
    assert split_of("Compute 1 + 6.") is Split.HELD_OUT
    share = sum(split_of(f"question {n}") is Split.HELD_OUT for n in range(2000)) / 2000
    assert 0.17 < share < 0.23


def test_equal_seeds_give_equal_tasks_and_others_do_not() -> None:
    assert generate(ALL, "train", 50, 3) == generate(ALL, "train", 50, 3)
    assert generate(ALL, "train", 50, 3) != generate(ALL, "train", 50, 4)


def test_tasks_are_different_and_families_have_equal_shares() -> None:
    tasks = generate(ALL, "held_out", 300, 0)
    assert len({task.id for task in tasks}) == len({task.question for task in tasks}) == 300
    assert {sum(task.family == family for task in tasks) for family in ALL} == {30}
    crowded = generate(("count",), "held_out", 3000, 0)
    assert len({task.id for task in crowded}) == len({task.question for task in crowded}) == 3000


def test_every_family_belongs_to_a_level() -> None:
    assert set(ALL) == set(FAMILIES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((("nothing",), "train", 1, 0), "task family is 'nothing'"),
        ((("count",), "train", 0, 0), "number of tasks is 0"),
        (((), "train", 5, 0), "number of tasks is 0"),
        ((("count",), "both", 1, 0), "split is 'both'; choose among train, held_out, all"),
    ],
)
def test_a_bad_request_names_thing_value_and_remedy(
    arguments: tuple[tuple[str, ...], str, int, int], message: str
) -> None:
    with pytest.raises(ConfigError, match="^" + message):
        generate(*arguments)


def test_a_builtin_source_is_the_generator() -> None:
    assert load_tasks("builtin:easy", split="train", count=10, seed=5) == generate(EASY, "train", 10, 5)
    assert {task.family for task in load_tasks("builtin:branch", count=3)} == {"branch"}
    with pytest.raises(ConfigError, match="built-in tasks is 'hardest'; choose among quickstart"):
        load_tasks("builtin:hardest")


def test_a_file_gives_its_tasks_in_order(tmp_path: Path) -> None:
    first = {"id": "a", "question": "1 + 1?", "answer": 2, "judge": "numeric", "family": "sums", "source": "ignored"}
    source = write(tmp_path / "t.jsonl", first, {"id": "b", "question": "Say é.", "answer": "é"})
    a, b = load_tasks(source)
    assert (a.id, a.question, a.answer, a.judge, a.family) == ("a", "1 + 1?", "2", "numeric", "sums")
    assert (b.answer, b.judge, b.family) == ("é", "exact", "")
    assert load_tasks(source, count=1) == (a,)


def test_the_splits_of_a_file_partition_it(tmp_path: Path) -> None:
    records = [{"id": str(n), "question": f"question {n}", "answer": "x"} for n in range(60)]
    source = write(tmp_path / "t.jsonl", *records)
    train, held_out = load_tasks(source, split="train"), load_tasks(source, split="held_out")
    assert set(train) | set(held_out) == set(load_tasks(source))
    assert not set(train) & set(held_out)


GOOD = '{"id": "a", "question": "q", "answer": "1"}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{GOOD}\n\n{{not json\n", r"t\.jsonl:3 is '\{not json'; write one JSON object a line"),
        (f"{GOOD}\n[1, 2]\n", r"t\.jsonl:2 is '\[1, 2\]'; write one JSON object a line"),
        ("[" * 100_000, r"t\.jsonl:1 is .*write one JSON object a line"),
        ('{"id": "a", "question": "q"}\n', r"t\.jsonl:1: field 'answer' is None; add it"),
        ('{"question": "q", "answer": 1}\n', r"t\.jsonl:1: field 'id' is None; add it"),
        ('{"id": "a", "question": ["q"], "answer": 1}\n', r"field 'question' is \['q'\]; give a text"),
        ('{"id": "a", "question": " ", "answer": 1}\n', r"field 'question' is ' '; it may not be empty"),
        (f"{GOOD}\n{GOOD}\n", r"t\.jsonl:2: id is 'a'; line 1 has it"),
        ("\n\n", r"number of tasks in .*t\.jsonl \(split all\) is 0"),
    ],
)
def test_a_bad_file_is_refused_with_path_line_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_tasks(str(tmp_path / "t.jsonl"))


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.jsonl.*No such file"):
        load_tasks(str(tmp_path / "absent.jsonl"))
    with pytest.raises(ConfigError, match="Is a directory"):
        load_tasks(str(tmp_path))
    (tmp_path / "latin").write_bytes(b"\xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_tasks(str(tmp_path / "latin"))


def test_gsm8k_answers_follow_the_marker(tmp_path: Path) -> None:
    source = write(tmp_path / "g", {"question": "How many?", "answer": "9 * 2 = <<9*2=18>>18\n#### 18"})
    (task,) = load_tasks(f"gsm8k:{source}")
    assert (task.id, task.answer, task.judge, task.family) == ("gsm8k-0", "18", "numeric", "gsm8k")
    source = write(tmp_path / "bad", {"question": "How many?", "answer": "it is 18"})
    with pytest.raises(ConfigError, match=r"bad:1: answer is 'it is 18'; end it with '#### ' and the number"):
        load_tasks(f"gsm8k:{source}")

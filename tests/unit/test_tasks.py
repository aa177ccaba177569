"""Promises of `repl_rl.tasks`."""

import asyncio
import hashlib
import importlib
import json
import random
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from repl_rl.errors import ConfigError
from repl_rl.judges import grade_answer
from repl_rl.sandbox import InProcessSandbox
from repl_rl.tasks import (
    EASY,
    FAMILIES,
    GRADED,
    HARD,
    LEVELS,
    TOPICS,
    Curriculum,
    CurriculumConfig,
    FollowUp,
    Split,
    Task,
    assign_tasks,
    draw_problem,
    get_split,
    load_tasks,
)
from repl_rl.tasks.generated_tasks import generate
from repl_rl.tasks.read_rows import TaskRow, is_number
from repl_rl.tasks.task import WeightedJudge, parse_weighted_judges

ALL = (*EASY, *HARD)


def write(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@settings(deadline=None, max_examples=25)
@given(seeds=st.tuples(st.integers(0, 2**31), st.integers(0, 2**31)))
def test_train_and_held_out_never_share_a_question_whatever_the_seeds(seeds: tuple[int, int]) -> None:
    train = {task.question for task in generate(ALL, "train", 40, seeds[0])}
    held_out = {task.question for task in generate(ALL, "held_out", 40, seeds[1])}
    assert not train & held_out
    assert {get_split(q) for q in train} == {Split.TRAIN}
    assert {get_split(q) for q in held_out} == {Split.HELD_OUT}


def test_the_split_is_stable_and_holds_out_about_a_fifth() -> None:
    assert get_split("Compute 1 + 2.") is Split.TRAIN
    assert get_split("Compute 1 + 6.") is Split.HELD_OUT
    share = sum(get_split(f"question {n}") is Split.HELD_OUT for n in range(2000)) / 2000
    assert 0.17 < share < 0.23


def test_equal_seeds_give_equal_tasks_and_others_do_not() -> None:
    assert generate(ALL, "train", 50, 3) == generate(ALL, "train", 50, 3)
    assert generate(ALL, "train", 50, 3) != generate(ALL, "train", 50, 4)


@pytest.mark.parametrize("family", [*ALL, *GRADED])
def test_the_tasks_of_a_seed_are_those_of_earlier_versions(family: str, snapshot: SnapshotAssertion) -> None:
    """Published results name a family and a seed. Another task in it would be another experiment."""
    tasks = generate((family,), "all", 60, 0)
    lines = "".join(f"{task.question}\n{task.answer}\n" for task in tasks)
    assert [tasks[0].question, tasks[0].answer, hashlib.sha256(lines.encode()).hexdigest()] == snapshot


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
        (f"{GOOD}\n\n{{not json\n", r"t\.jsonl:3 is '\{not json'; write one JSON object per line"),
        (f"{GOOD}\n[1, 2]\n", r"t\.jsonl:2 is '\[1, 2\]'; write one JSON object per line"),
        ("[" * 100_000, r"t\.jsonl:1 is .*write one JSON object per line"),
        ('{"id": "a", "question": "q"}\n', r"t\.jsonl:1: field 'answer' is None; add it"),
        (
            '{"question": "p", "answer": 1}\n{"id": "1", "question": "q", "answer": 1}\n',
            r"id is '1'; line 1 has the same id",
        ),
        ('{"id": "a", "question": ["q"], "answer": 1}\n', r"field 'question' is \['q'\]; give a text"),
        ('{"id": "a", "question": " ", "answer": 1}\n', r"field 'question' is ' '; it may not be empty"),
        (
            '{"question": "q", "answer": 1, "answer": 2}',
            r"t\.jsonl:1: number of values of 'answer' is 2; give it one value",
        ),
        (f'{GOOD}\n{{"note": [{{"a": 1, "a": 1, "a": 2}}]}}', r"t\.jsonl:2: number of values of 'a' is 3; give it one"),
        (
            '{"question": "q", "answer": 1, "workspace": "{\\"files\\": {}, \\"files\\": {}}"}',
            r"t\.jsonl:1: field 'workspace': number of values of 'files' is 2; give it one value",
        ),
        (f"{GOOD}\n{GOOD}\n", r"t\.jsonl:2: id is 'a'; line 1 has the same id"),
        ("\n\n", r"number of tasks in .*t\.jsonl \(split all\) is 0"),
    ],
)
def test_a_bad_file_is_refused_with_path_line_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_tasks(str(tmp_path / "t.jsonl"))


def test_a_row_without_an_id_has_the_number_of_its_line(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"question": "p", "answer": 1}\n\n{"question": "q", "answer": 2}\n')
    assert [task.id for task in load_tasks(str(tmp_path / "t.jsonl"))] == ["1", "3"]


HALF = '{"id": "a%s", "question": "q%s", "answer": "1%s"}\n'


@pytest.mark.parametrize(("place", "field"), [(0, "id"), (1, "question"), (2, "answer")])
def test_half_of_a_surrogate_pair_is_refused_with_file_line_and_field(tmp_path: Path, place: int, field: str) -> None:
    text = HALF % tuple("\\ud83d" if at == place else "" for at in range(3))
    (tmp_path / "t.jsonl").write_text(f"{GOOD}\n{text}")
    with pytest.raises(ConfigError) as refused:
        load_tasks(str(tmp_path / "t.jsonl"), split="train")
    message = str(refused.value)
    assert f"t.jsonl:2: field '{field}' is " in message
    assert "half of a surrogate pair" in message
    assert message.isascii()
    assert "\n" not in message
    (tmp_path / "t.jsonl").write_text(HALF % (1, "\\ud83d\\ude00", 3))
    assert load_tasks(str(tmp_path / "t.jsonl"))[0].question == "q\U0001f600"


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ('"note": "\\ud800"', "field 'note' is "),
        ('"note": {"a": ["x", {"b": "\\ud800"}]}', "field 'note.a.2.b' is "),
        ('"note": {"\\ud800": 1}', "field 'note', key is "),
        ('"\\ud800": 1', "t.jsonl:2: key is "),
        ('"judge": "\\ud800"', "field 'judge' is "),
        ('"follow_ups": [{"question": "\\ud800", "answer": 1}]', "field 'follow_ups.1.question' is "),
        ('"workspace": {"files": {"a": "\\ud800"}}', "field 'workspace.files.a' is "),
        ('"workspace": {"values": {"x": ["\\ud800"]}}', "field 'workspace.values.x.1' is "),
        ('"workspace": {"lines": ["x = 1", "\\ud800"]}', "field 'workspace.lines.2' is "),
        ('"workspace": {"preload": ["csv"], "told": "\\ud800"}', "field 'workspace.told' is "),
        ('"workspace": "{\\"files\\": {\\"a\\": \\"\\\\ud800\\"}}"', "field 'workspace.files.a' is "),
    ],
)
def test_half_of_a_surrogate_pair_in_any_text_of_a_row_is_refused_with_its_field(
    tmp_path: Path, fields: str, place: str
) -> None:
    row = f'{{"id": "b", "question": "q", "answer": "1", {fields}}}\n'
    (tmp_path / "t.jsonl").write_text(f"{GOOD}\n{row}")
    with pytest.raises(ConfigError) as refused:
        load_tasks(str(tmp_path / "t.jsonl"))
    message = str(refused.value)
    assert "t.jsonl:2: " in message
    assert place in message
    assert "half of a surrogate pair" in message
    assert message.isascii()
    (tmp_path / "t.jsonl").write_text(row.replace("\\\\ud800", "x").replace("\\ud800", "x"))
    load_tasks(str(tmp_path / "t.jsonl"))


@pytest.mark.parametrize("field", ["note", "follow_ups", "workspace", "question"])
def test_a_row_that_is_nested_too_deeply_is_refused_with_its_field(tmp_path: Path, field: str) -> None:
    for opening, closing in (("[", "]"), ('{"a": ', "}")):
        row = {"id": "a", "question": "q", "answer": "1", field: "@"}
        text = json.dumps(row).replace('"@"', f"{opening * 900}1{closing * 900}")
        (tmp_path / "t.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=rf"t\.jsonl:1: field '{field}', levels is 101; nest at most 100"):
            load_tasks(str(tmp_path / "t.jsonl"))


def test_half_of_a_surrogate_pair_is_refused_in_tasks_and_follow_ups_made_in_python() -> None:
    with pytest.raises(ConfigError, match=r"task\.question is .*half of a surrogate pair"):
        Task("t", "\ud83d?", "1")
    with pytest.raises(ConfigError, match=r"follow-up\.answer is .*half of a surrogate pair"):
        FollowUp("q", "\udc00")


def test_a_byte_order_mark_at_the_beginning_of_a_file_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(f"{GOOD}\n", encoding="utf-8-sig")
    assert load_tasks(str(tmp_path / "t.jsonl")) == (Task("a", "q", "1"),)
    (tmp_path / "t.jsonl").write_text(f"{{no\n{GOOD}\n", encoding="utf-8-sig")
    with pytest.raises(ConfigError, match=r"t\.jsonl:1 is '\{no'"):
        load_tasks(str(tmp_path / "t.jsonl"))


def test_an_answer_that_is_a_number_is_compared_as_a_number_unless_a_judge_is_named(tmp_path: Path) -> None:
    answers: tuple[object, ...] = (18.0, 1e3, 10**80, "18.0", 0.1, 1e308, -7)
    records = [{"id": str(n), "question": f"q{n}", "answer": answer} for n, answer in enumerate(answers)]
    source = write(tmp_path / "t.jsonl", *records, {**records[0], "id": "named", "judge": "exact"})
    tasks = load_tasks(source)
    assert [t.judge for t in tasks] == ["numeric"] * 3 + ["exact"] + ["numeric"] * 3 + ["exact"]
    given = ["18", "1000", str(10**80), "18", repr(0.3 - 0.2), "1e+308", "-7.0", "18"]
    assert [grade_answer(t, answer) for t, answer in zip(tasks, given, strict=True)] == [1, 1, 1, 0, 1, 1, 1, 0]
    assert grade_answer(tasks[2], str(10**80 + 1)) == 0.0
    assert {t.judge for t in load_tasks(f"{source}?judge=math")} == {"math"}
    with pytest.raises(ConfigError, match=r"t\.jsonl:1: field 'answer' is nan; give a finite number"):
        load_tasks(write(tmp_path / "t.jsonl", {"id": "a", "question": "q", "answer": float("nan")}))


def test_a_row_may_give_its_judges_with_weights(tmp_path: Path) -> None:
    row = {"id": "a", "question": "q", "answer": "x", "judge": {"exact": 1, "regex": 0.5}}
    (task,) = load_tasks(write(tmp_path / "t.jsonl", row))
    assert parse_weighted_judges(task.judge) == (WeightedJudge("exact"), WeightedJudge("regex", 0.5))
    for wrong, said in (("much", "give its weight, a finite number"), (True, "give its weight")):
        with pytest.raises(ConfigError, match=said):
            load_tasks(write(tmp_path / "t.jsonl", {**row, "judge": {"exact": wrong}}))
    with pytest.raises(ConfigError, match="it would be imported, and run"):
        load_tasks(write(tmp_path / "t.jsonl", {**row, "judge": {"exact": 1, "nowhere:f": 1}}))


def test_decimals_and_floats_of_32_bits_are_the_numbers_that_their_columns_show(tmp_path: Path) -> None:
    from datasets import Dataset

    pa, pq = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    columns = {
        "question": pa.array(["a", "b"]),
        "whole": pa.array([18, None], pa.float64()),
        "short": pa.array([0.1, 1234.5], pa.float32()),
        "exact": pa.array([Decimal("0.10"), Decimal("12.50")]),
        "nested": pa.array([{"value": 0.7}, {"value": 2.5}], pa.struct([("value", pa.float32())])),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    Dataset(pa.table(columns)).save_to_disk(str(tmp_path / "saved"))
    for place in (f"{tmp_path}/t.parquet", f"dataset:{tmp_path}/saved"):
        for name, answers in (
            ("short", ["0.1", "1234.5"]),
            ("exact", ["0.1", "12.5"]),
            ("nested.value", ["0.7", "2.5"]),
        ):
            tasks = load_tasks(f"{place}?answer={name}")
            assert [grade_answer(t, answer) for t, answer in zip(tasks, answers, strict=True)] == [1.0, 1.0], (
                place,
                name,
            )
            assert {t.judge for t in tasks} == {"numeric"}
        with pytest.raises(ConfigError, match="row 2: field 'whole' is None"):
            load_tasks(f"{place}?answer=whole")


def test_numbers_of_numpy_are_numbers() -> None:
    import numpy as np

    for value, text in (
        (np.float32(0.1), "0.1"),
        (np.int64(7), "7"),
        (np.float64(0.5), "0.5"),
        (Decimal("1E+3"), "1E+3"),
    ):
        assert is_number(value)
        assert TaskRow("t:1", 1, {"answer": value}).get_text("answer") == text
    assert not is_number(np.bool_(True))
    assert not is_number(True)


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


@pytest.mark.parametrize(
    ("split", "seed", "digest"), [("train", 0, "39b6a262eecac624"), ("held_out", 3, "eb8b52dff4e4cfcb")]
)
def test_the_tasks_of_the_bundled_policy_never_change(split: str, seed: int, digest: str) -> None:
    tasks = load_tasks("builtin:quickstart", split=split, count=300, seed=seed)
    text = "\n".join("|".join((t.id, t.question, t.answer, t.judge, t.family)) for t in tasks)
    assert hashlib.sha256(text.encode()).hexdigest().startswith(digest)


async def echoed(setup: tuple[str, ...], expression: str) -> str:
    async with InProcessSandbox().session() as console:
        for line in setup:
            await console.push(line)
        return (await console.push(expression)).text.strip()


@pytest.mark.parametrize("family", [*FAMILIES, *GRADED])
def test_the_lines_of_every_sketch_echo_its_answer(family: str) -> None:
    for seed in range(12):
        drawn = draw_problem(family, random.Random(seed))
        shown = asyncio.run(echoed(drawn.setup, drawn.expression))
        assert shown.strip("'") == drawn.answer, drawn


def test_graded_sources_are_topics_and_levels_on_both_sides_of_the_split() -> None:
    assert len(GRADED) == len(TOPICS) * len(LEVELS) == 24
    assert {t.family for t in load_tasks("builtin:graded", count=48)} == set(GRADED)
    assert {t.family for t in load_tasks("builtin:graded/3", count=16)} == {f"{topic}/3" for topic in TOPICS}
    assert {t.family for t in load_tasks("builtin:dates", count=9)} == {"dates/1", "dates/2", "dates/3"}
    for family in GRADED:
        held_out = load_tasks(f"builtin:{family}", split="held_out", count=60)
        train = load_tasks(f"builtin:{family}", split="train", count=60)
        assert not {t.question for t in held_out} & {t.question for t in train}
        assert all("/" not in t.id for t in train)


def parquet(path: Path, columns: dict[str, list[object]]) -> str:
    from datasets import Dataset

    Dataset.from_dict(columns).to_parquet(str(path))
    return str(path)


def test_parquet_gives_its_rows_and_fields_can_be_mapped(tmp_path: Path) -> None:
    columns: dict[str, list[object]] = {
        "problem": ["1 + 1?", "2 + 2?"],
        "value": [2, 4],
        "meta": [{"kind": "sums"}] * 2,
    }
    source = parquet(tmp_path / "t.parquet", columns)
    a, b = load_tasks(f"{source}?question=problem&answer=value&family=meta.kind&judge=numeric")
    assert a == Task("1", "1 + 1?", "2", "numeric", "sums", fields={"meta": {"kind": "sums"}})
    assert (b.id, b.answer) == ("2", "4")
    with pytest.raises(ConfigError, match=r"t\.parquet, row 1: field 'question' is None; add it; it has \['meta', 'p"):
        load_tasks(source)
    with pytest.raises(ConfigError, match=r"row 1: field 'absent' is None; add it"):
        load_tasks(f"{source}?question=problem&answer=absent")
    with pytest.raises(ConfigError, match=r"option 'answr' of .*t\.parquet is 'value'; choose among id, question"):
        load_tasks(f"{source}?answr=value")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match=r"torn\.parquet.*it cannot be read as Parquet"):
        load_tasks(str(tmp_path / "torn.parquet"))


@pytest.mark.parametrize("kind", ["texts", "rows", "nothings"])
def test_parquet_is_read_only_as_far_as_its_size_on_disk_explains(tmp_path: Path, kind: str) -> None:
    """Without the bound, the rows take 3.4 GB, 2 million tasks, and 100 million elements."""
    pa, pq = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    text, count = ("x" * (16 << 20), 200) if kind == "texts" else ("x", 2_000_000 if kind == "rows" else 1)
    same = pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), count), pa.array([text]))
    columns = {"question": same, "answer": pa.repeat(pa.scalar(1, pa.int8()), count)}
    if kind == "nothings":
        columns["note"] = pa.ListArray.from_arrays(pa.array([0, 10_000_000]), pa.nulls(10_000_000, pa.int8()))
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table(columns), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 100_000
    with pytest.raises(ConfigError, match=r"file is '.*t\.parquet'; it unpacks to more than .* 100 times") as refused:
        load_tasks(str(path), count=1)
    assert "\n" not in str(refused.value)


def test_a_data_set_is_read_only_as_far_as_its_size_on_disk_explains(tmp_path: Path) -> None:
    from datasets import Dataset

    pa = importlib.import_module("pyarrow")
    Dataset.from_dict({"question": ["q"], "answer": ["1"]}).save_to_disk(str(tmp_path / "saved"))
    (file,) = (tmp_path / "saved").glob("*.arrow")
    same = pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), 50), pa.array(["x" * (1 << 20)]))
    table = pa.table({"question": same, "answer": pa.repeat("1", 50)})
    packed = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema, options=packed) as writer:
        writer.write_table(table)
    with pytest.raises(ConfigError, match=r"dataset is '.*saved'; it unpacks to more than .* 100 times"):
        load_tasks(f"dataset:{tmp_path}/saved", count=1)


def test_a_table_of_repeated_texts_whose_size_explains_it_is_read_whole(tmp_path: Path) -> None:
    source = parquet(tmp_path / "t.parquet", {"question": ["q" * 1000] * 5000, "answer": [1] * 5000})
    assert len(load_tasks(source)) == 5000


@pytest.mark.parametrize("kind", ["text", "date", "duration"])
def test_a_value_that_python_cannot_hold_is_one_line(tmp_path: Path, kind: str) -> None:
    pa, pq = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    column = {
        "text": pa.StringArray.from_buffers(1, pa.py_buffer(bytes(4) + b"\2\0\0\0"), pa.py_buffer(b"\xed\xa0")),
        "date": pa.array([2**31 - 1], pa.int32()).cast(pa.date32()),
        "duration": pa.array([2**62], pa.int64()).cast(pa.duration("ms")),
    }[kind]
    pq.write_table(pa.table({"question": ["q"], "answer": ["1"], "note": column}), tmp_path / "t.parquet")
    with pytest.raises(ConfigError, match=r"t\.parquet'; it cannot be read as Parquet: ") as refused:
        load_tasks(str(tmp_path / "t.parquet"))
    assert "\n" not in str(refused.value)


def test_a_data_set_is_loaded_by_path_and_its_parts_by_name(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    one = Dataset.from_dict({"question": ["1 + 1?", "2 + 2?"], "answer": ["2", "4"]})
    one.save_to_disk(str(tmp_path / "one"))
    DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(str(tmp_path / "parts"))
    assert [t.id for t in load_tasks(f"dataset:{tmp_path}/one")] == ["1", "2"]
    (test,) = load_tasks(f"dataset:{tmp_path}/parts?part=test&judge=math")
    assert (test.question, test.answer, test.judge) == ("2 + 2?", "4", "math")
    with pytest.raises(ConfigError, match=r"dataset is '.*parts'; its part 'nothing' cannot be loaded"):
        load_tasks(f"dataset:{tmp_path}/parts?part=nothing")
    with pytest.raises(ConfigError, match=r"option 'part' of .* is 'test'; only dataset:NAME has it; drop it"):
        load_tasks(f"{tmp_path}/t.jsonl?part=test")


def test_math_answers_are_given_or_boxed_in_the_solution(tmp_path: Path) -> None:
    solved = {"problem": "Half?", "solution": r"so \boxed{1}, or \boxed{\frac{1}{2}}.", "type": "Algebra"}
    given = {"problem": "Two?", "solution": "none", "answer": "2", "subject": "Number Theory", "unique_id": "n/7"}
    a, b = load_tasks(f"math:{write(tmp_path / 'm.jsonl', solved, given)}")
    assert (a.id, a.question, a.answer, a.judge, a.family) == ("math-0", "Half?", r"\frac{1}{2}", "math", "Algebra")
    assert (b.id, b.answer, b.family) == ("math-n/7", "2", "Number Theory")
    for bad in ("it is 3", r"\boxed{3", r"\boxed{}"):
        source = write(tmp_path / "bad.jsonl", {"problem": "?", "solution": bad})
        with pytest.raises(ConfigError, match=r"bad\.jsonl:1: field 'solution' is .*put the answer into"):
            load_tasks(f"math:{source}")


def test_a_task_of_several_turns_gives_each_question_as_a_task_of_its_own(tmp_path: Path) -> None:
    turns = [{"question": "And doubled?", "answer": 84, "judge": "numeric"}]
    source = write(tmp_path / "t.jsonl", {"id": "a", "question": "6 * 7?", "answer": 42, "follow_ups": turns})
    (task,) = load_tasks(source)
    assert task.follow_ups == (FollowUp("And doubled?", "84", "numeric"),)
    assert [(t.id, t.question, t.answer, t.judge, t.follow_ups) for t in task.split_turns()] == [
        ("a", "6 * 7?", "42", "numeric", ()),
        ("a.1", "And doubled?", "84", "numeric", ()),
    ]
    for bad, message in (
        ("x", "give a list of records"),
        (["x"], "give records"),
        ([{"question": "q"}], "follow-up 1: f"),
    ):
        source = write(tmp_path / "t.jsonl", {"id": "a", "question": "q", "answer": 1, "follow_ups": bad})
        with pytest.raises(ConfigError, match=message):
            load_tasks(source)


def two_families() -> list[Task]:
    return [Task(f"{family}{n}", f"{family}{n}?", "1", family=family) for family in "ab" for n in range(5)]


def test_a_curriculum_prefers_what_is_solved_now_and_then() -> None:
    curriculum = Curriculum(two_families())
    assert curriculum.weights == {"a": 0.5, "b": 0.5}
    curriculum.record([("a0", 1.0)] * 40 + [("b0", float(n % 2)) for n in range(40)])
    assert curriculum.solve_rates["a"] > 0.9
    assert curriculum.weights["b"] > 0.75
    assert sum(curriculum.weights.values()) == pytest.approx(1.0)
    assert sum(task.family == "b" for task in curriculum.draw(400)) > 280


@given(outcomes=st.lists(st.tuples(st.sampled_from(["a0", "b3"]), st.floats(0, 1)), max_size=300))
def test_no_family_is_ever_left_out_and_rates_stay_within_bounds(outcomes: list[tuple[str, float]]) -> None:
    curriculum = Curriculum(two_families(), config=CurriculumConfig(uniform_share=0.2, decay=0.9))
    curriculum.record(outcomes)
    assert all(0 < rate < 1 for rate in curriculum.solve_rates.values())
    assert all(weight >= 0.1 - 1e-12 for weight in curriculum.weights.values())


def test_a_curriculum_repeats_exactly_and_takes_every_task_before_one_comes_again() -> None:
    def play(seed: int) -> list[str]:
        curriculum, drawn = Curriculum(two_families(), seed), []
        for _ in range(20):
            batch = curriculum.draw(3)
            curriculum.record([(task.id, float(task.id in ("a1", "b2"))) for task in batch])
            drawn += [task.id for task in batch]
        return drawn

    assert play(1) == play(1) != play(2)
    for family in "ab":
        mine = [task_id for task_id in play(1) if task_id[0] == family]
        for start in range(0, len(mine) - 4, 5):
            assert len(set(mine[start : start + 5])) == 5


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_share_a_step_of_the_curriculum_though_a_group_may_straddle_them(processes: int) -> None:
    groups, size = 6, 4
    whole = assign_tasks(Curriculum(two_families()), ["slot"] * (groups * size), size)
    parts = [
        assign_tasks(Curriculum(two_families()), ["slot"] * (groups * size // processes), size, process, processes)
        for process in range(processes)
    ]
    assert [task_id for part in parts for task_id in part] == list(whole)
    assert [len(set(whole[start : start + size])) for start in range(0, len(whole), size)] == [1] * groups


def test_the_mean_level_is_that_of_the_families_and_0_without_levels() -> None:
    tasks = load_tasks("builtin:dates", count=30)
    level = Curriculum(tasks).compute_mean_level
    assert level(task.id for task in tasks if task.family == "dates/3") == 3.0
    assert level(task.id for task in tasks) == 2.0
    assert Curriculum(two_families()).compute_mean_level(["a0", "b1"]) == 0.0


def test_a_curriculum_refuses_strangers_and_bad_settings() -> None:
    with pytest.raises(ConfigError, match="task id is 'c9'"):
        Curriculum(two_families()).record([("c9", 1.0)])
    with pytest.raises(ConfigError, match=r"curriculum\.uniform_share is 0"):
        CurriculumConfig(uniform_share=0)
    with pytest.raises(ConfigError, match="number of tasks is 0"):
        Curriculum([])
    with pytest.raises(ConfigError, match="number of tasks is 0"):
        Curriculum(two_families()).draw(0)

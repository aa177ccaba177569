"""A task's workspace, from its row to the run that stores it: what it may hold, and where it comes back."""

import base64
import json
import os
from pathlib import Path

import pytest
from datasets import Dataset

from repl_rl.errors import ConfigError
from repl_rl.tasks import Task, Workspace, load_tasks
from repl_rl.tasks.task_workspace import MAX_BYTES
from tests.support.scripted_rollouts import RENDERER


def test_equal_contents_have_one_digest_whatever_the_order_in_which_they_are_named() -> None:
    one = Workspace(values={"a": 1, "b": [2.5, None]}, files={"x": b"1", "y": b"2"})
    other = Workspace(values={"b": [2.5, None], "a": 1}, files={"y": b"2", "x": b"1"})
    assert one == other
    assert hash(one) == hash(other)
    assert one.digest == other.digest
    assert one != Workspace(values={"a": 1, "b": [2.5, 0]}, files={"x": b"1", "y": b"2"})


def test_the_order_within_a_value_is_kept_since_a_console_shows_it() -> None:
    one, other = Workspace(values={"d": {"b": 1, "a": 2}}), Workspace(values={"d": {"a": 2, "b": 1}})
    assert one.digest != other.digest
    assert list(json.loads(one.content)["values"]["d"]) == ["b", "a"]


def test_what_is_written_is_read_back() -> None:
    workspace = Workspace({"rows": [[1, "ü\n"]]}, {"a/b": bytes(range(256))}, ("x = 1", ""), ("json",), "A table.")
    again = Workspace.from_content(workspace.content)
    assert again == workspace
    assert (again.values, again.files, again.lines, again.preload, again.told) == (
        workspace.values,
        workspace.files,
        workspace.lines,
        workspace.preload,
        workspace.told,
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict, "workspace is 'empty'; leave it out"),
        (lambda: {"values": {"x y": 1}}, "give a Python name that is not reserved"),
        (lambda: {"values": {"class": 1}}, "give a Python name that is not reserved"),
        (lambda: {"values": {"__builtins__": 1}}, "give a Python name that is not reserved"),
        (lambda: {"values": {"submit_final_answer": 1}}, "give a Python name that is not reserved"),
        (lambda: {"values": {"x": (1, 2)}}, "lists, not tuples"),
        (lambda: {"values": {"x": {1: 2}}}, "texts as keys"),
        (lambda: {"values": {"x": float("nan")}}, "give a JSON value"),
        (lambda: {"values": {"x": object()}}, "give a JSON value"),
        (lambda: {"files": {"/etc/passwd": b""}}, "below the console's working folder"),
        (lambda: {"files": {"a/../../b": b""}}, "below the console's working folder"),
        (lambda: {"files": {"a//b": b""}}, "below the console's working folder"),
        (lambda: {"files": {"a\nb": b""}}, "below the console's working folder"),
        (lambda: {"files": {"a": b"", "a/b": b""}}, "a is a file; give it another name"),
        (lambda: {"files": {"a": "text"}}, "give bytes"),
        (lambda: {"files": {"x" * 300: b""}}, "give shorter names"),
        (lambda: {"files": {str(n): b"" for n in range(1001)}}, "give at most 1000"),
        (lambda: {"files": {"large": bytes(MAX_BYTES)}}, f"give at most {MAX_BYTES}"),
        (lambda: {"lines": ("x = 1\ny = 2",)}, "without newline"),
        (lambda: {"lines": ("x = 1", "y = = 2")}, "line 2 is 'y = = 2'; correct it"),
        (lambda: {"lines": ("x = " + "-" * 100_000 + "1",)}, "line 1 is 'x = ---"),
        (lambda: {"lines": ("y = 1", "x = " + "-" * 100_000 + "1")}, "lines is 'y = 1'; correct it: it is nested"),
        (lambda: {"lines": ("x = " + "(" * 100_000,)}, "correct it: "),
        (lambda: {"lines": ("x = " + "+".join("1" * 3000),)}, "nested too deeply"),
        (lambda: {"lines": ("x = '\0'",)}, "null bytes"),
        (lambda: {"lines": ("x = '\ud800'",)}, "correct it: "),
        (lambda: {"lines": ("x = " + "1" * 5000,)}, "correct it: "),
        (lambda: {"preload": ("json",), "told": "\ud800"}, "workspace.told is .*half of a surrogate pair"),
        (lambda: {"lines": ["x = 1"]}, "give a tuple of texts"),
        (lambda: {"preload": ("no module",)}, "give names of modules"),
        (lambda: {"preload": ("json",), "told": "two\nlines"}, "give one line"),
    ],
)  # fmt: skip
def test_what_no_console_could_begin_with_is_refused(given: object, message: str) -> None:
    assert callable(given)
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        Workspace(**given())


def test_the_prompt_says_names_types_and_sizes_unless_it_is_told_otherwise() -> None:
    workspace = Workspace(
        {"rows": [1, 2], "limit": 3}, {"a.csv": bytes(1200)}, ("def first():", "    return rows[0]", "_p = 1"), ("csv",)
    )
    names = "names limit (int), rows (list of 2), first (defined)"
    assert workspace.describe() == f"In the console already: {names}; files a.csv (1.2 kB); imported csv."
    assert Workspace({"x": 1}, told="").describe() == ""
    task = Task("t", "How many?", "2", workspace=Workspace({"x": 1}, told="There is x."))
    assert RENDERER.fill_template("bare", task.question, "3", task.workspace_text).head == "How many? There is x.\n"
    assert task.full_question == "How many?\nThere is x."


def test_a_prompt_of_ones_own_places_it() -> None:
    shown = RENDERER.fill_template("text:Task: {question}\n# {workspace}\n>>> ", "How many?", "3", "There is x.")
    assert shown.head + shown.console == "Task: How many?\n# There is x.\n>>> "
    system = RENDERER.fill_template("text:You have a console. {workspace}", "How many?", "3", "There is x.")
    assert (system.system, system.question) == ("You have a console. There is x.", "How many?")
    assert RENDERER.fill_template("chat", "How many?", "3", "There is x.").question == "How many? There is x."


def rows(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_a_row_carries_a_workspace_and_keeps_every_other_field(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/t.csv").write_bytes(b"a\n1\n")
    said = {
        "values": {"rows": [1, 2]},
        "files": {
            "a.txt": "ä",
            "b.bin": {"base64": base64.b64encode(b"\x00").decode()},
            "c.csv": {"path": "data/t.csv"},
        },
        "lines": "total = sum(rows)\n",
        "preload": ["csv"],
    }
    row = {"id": "t", "question": "?", "answer": 3, "workspace": said, "level": 2, "source": {"page": 7}}
    (task,) = load_tasks(rows(tmp_path / "t.jsonl", row))
    files = {"a.txt": "ä".encode(), "b.bin": b"\x00", "c.csv": b"a\n1\n"}
    assert task.workspace == Workspace({"rows": [1, 2]}, files, ("total = sum(rows)",), ("csv",))
    assert task.fields == {"level": 2, "source": {"page": 7}}


def test_fields_that_a_source_reads_under_another_name_are_not_kept_twice(tmp_path: Path) -> None:
    place = rows(tmp_path / "t.jsonl", {"id": "t", "problem": "?", "answer": "as given", "gold": 3, "question": "long"})
    (task,) = load_tasks(f"{place}?question=problem&answer=gold")
    assert (task.question, task.answer) == ("?", "3")
    assert task.fields == {"answer": "as given", "question": "long"}
    place = rows(tmp_path / "g.jsonl", {"question": "?", "answer": "2 + 2 = 4\n#### 4", "id": "x"})
    (task,) = load_tasks(f"gsm8k:{place}")
    assert task.fields == {"answer": "2 + 2 = 4\n#### 4", "id": "x"}


def test_columns_that_other_rows_have_are_no_part_of_a_workspace(tmp_path: Path) -> None:
    records = [
        {"question": "a", "answer": "1", "workspace": {"values": {"x": 1, "y": None}, "files": None, "lines": None}},
        {
            "question": "b",
            "answer": "1",
            "workspace": {"values": {"x": None, "y": [2]}, "files": None, "lines": ["z = 1"]},
        },
        {"question": "c", "answer": "1", "workspace": None},
    ]
    Dataset.from_list(records).to_parquet(tmp_path / "t.parquet")
    first, second, third = load_tasks(str(tmp_path / "t.parquet"))
    assert first.workspace == Workspace({"x": 1})
    assert second.workspace == Workspace({"y": [2]}, lines=("z = 1",))
    assert third.workspace is None
    as_text = [{"question": "a", "answer": "1", "workspace": json.dumps({"values": {"x": None}})}]
    Dataset.from_list(as_text).to_parquet(tmp_path / "text.parquet")
    (task,) = load_tasks(str(tmp_path / "text.parquet"))
    assert task.workspace is not None
    assert json.loads(task.workspace.content)["values"] == {"x": None}


@pytest.mark.parametrize(
    ("workspace", "message"),
    [
        ([1], "t.jsonl:1: field 'workspace' is .*; give a record of values, files, lines, preload, told"),
        ({"value": {}}, "t.jsonl:1: field 'workspace', key is 'value'; choose among"),
        ({"values": [1]}, "t.jsonl:1: workspace.values is .*; give a record"),
        ({"lines": ["x = ="]}, "t.jsonl:1: workspace.lines, line 1 is 'x = ='; correct it"),
        ({"lines": [1]}, "t.jsonl:1: workspace, lines or modules"),
        ({"files": {"a": {"base64": "%"}}}, "t.jsonl:1: workspace.files..a.. is '%'; give base64"),
        ({"files": {"a": {"path": "../secret"}}}, "below the folder of the task file"),
        ({"files": {"a": {"path": "/etc/passwd"}}}, "below the folder of the task file"),
        ({"files": {"a": {"path": "missing"}}}, "it cannot be read: No such file"),
        ({"files": {"a": {"path": "a\0b"}}}, "it cannot be read: embedded null"),
        ({"files": {"a": {"path": "x" * 5000}}}, "it cannot be read: File name too long"),
        ({"files": {"a": {"path": "loop"}}}, "it cannot be read: "),
        ({"files": {"a": {"path": "pipe"}}}, "it is not a regular file; give one"),
        ({"files": {"a": {"path": "."}}}, "it is not a regular file; give one"),
        ({"lines": ["x = " + "-" * 100_000 + "1"]}, "t.jsonl:1: workspace.lines, line 1 is 'x = --.*nested too deeply"),
        ({"files": {"a": 3}}, "give a text"),
        ({}, "t.jsonl:1: workspace is 'empty'; leave it out"),
        ("{", "t.jsonl:1: field 'workspace' is '{'; write one JSON object"),
    ],
)
def test_a_bad_workspace_is_refused_with_its_row(tmp_path: Path, workspace: object, message: str) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/loop").symlink_to("loop")
    os.mkfifo(tmp_path / "tasks/pipe")
    row = {"id": "t", "question": "?", "answer": 3, "workspace": workspace}
    with pytest.raises(ConfigError, match=message):
        load_tasks(rows(tmp_path / "tasks/t.jsonl", row))

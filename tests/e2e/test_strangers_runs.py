"""Run folders, task files and working folders of strangers: what they cannot have run on this machine."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.cli.serve import ServeConfig
from repl_rl.cli.train import TrainConfig
from repl_rl.errors import ConfigError
from repl_rl.rollout_config import RolloutConfig, _refuse_unrecorded, find_recorded_task
from repl_rl.runs.store import Store, write_step
from repl_rl.runs.store.export_formats import write_notebook
from repl_rl.runs.trajectory_player import TrajectoryPlayer
from repl_rl.sandbox import SANDBOXES, Docker, Local, Unsafe
from repl_rl.settings.argument_parser import dump_toml
from repl_rl.settings.component_registry import WorkingFolderFinder
from repl_rl.tasks import load_tasks
from repl_rl.trajectory.trajectory import Execution, Line, LineEnd, LineStatus, Sampled, Trajectory
from tests.support.run_folders import rollout

ROOT = Path(__file__).parents[2]


def wrote(text: str) -> Trajectory:
    """A trajectory whose one line answered."""
    line = Line((5, 6), (-0.1, -0.2), f"{text}\n", LineEnd.NEWLINE, Execution(LineStatus.ANSWERED, 0.0, "1", (text,)))
    return replace(rollout(0, "t", 0), segments=(Sampled((line,)),))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that exists once something of the stranger's ran on this machine."""
    return tmp_path / "ran"


@pytest.fixture
def stranger(tmp_path: Path, mark: Path) -> Path:
    """A run whose line and whose modules leave the mark."""
    run = tmp_path / "stranger"
    run.mkdir()
    write_step(run / "trajectories", 0, [wrote(f"open({str(mark)!r}, 'w').close(); submit_final_answer(1)")])
    for name in ("evil_plugin", "neighbour_of_evil"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\ndef f(*_): return 1.0\n")
    return run


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0].endswith(("_plugin", "_of_evil", "_helper"))]:
        del sys.modules[name]


def says(run: Path, text: str) -> Path:
    (run / "config.toml").write_text(text)
    return run


UNASKED = {
    "unsafe": ('sandbox = "unsafe"', "is 'unsafe'; its lines would run without isolation.*--sandbox unsafe"),
    "gateway": ('sandbox = "gateway"', "'gateway'; its lines would run without isolation.*--sandbox gateway"),
    "nodes": ('sandbox = "nodes"', "'nodes'; its consoles are on other machines.*--sandbox nodes"),
    "an image": ('sandbox = "docker"\n[docker]\nimage = "evil:1"', "image='evil:1'.*--trust .*--sandbox docker"),
    "a runtime": ('sandbox = "docker"\n[docker]\nruntime = "mine"', "runtime='mine'.*--trust .*--sandbox docker"),
}  # fmt: skip
DOORS = (["--verify"], ["--to-line", "1"], ["--branch", "1"])


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door[0])
@pytest.mark.parametrize("kind", UNASKED)
def test_replay_runs_lines_in_no_sandbox_that_the_user_did_not_choose(
    kind: str, door: list[str], stranger: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, complaint = UNASKED[kind]
    assert main(["replay", str(says(stranger, text)), *door]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    with pytest.raises(ConfigError, match=complaint):
        RolloutConfig.from_run(stranger)
    assert "sandbox in" in line
    assert not mark.exists()


def test_a_notebook_and_a_single_file_are_held_to_the_same(
    stranger: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says(stranger, 'sandbox = "unsafe"')
    (entry,) = Store(stranger)
    write_notebook(entry, stranger / "one.ipynb")
    for source in (stranger / "one.ipynb", stranger / "trajectories" / "000000.jsonl.gz", stranger / "trajectories"):
        assert main(["replay", str(source), "--verify"]) == 2
        assert "sandbox unsafe" in capsys.readouterr().err
    assert not mark.exists()


def test_the_player_asks_for_the_sandbox_in_python(stranger: Path) -> None:
    says(stranger, 'sandbox = "unsafe"')
    with pytest.raises(ConfigError, match=r"'unsafe'; .*sandbox= in Python"):
        TrajectoryPlayer(stranger)
    for chosen in ("local", "unsafe", ""):
        TrajectoryPlayer(stranger, sandbox=chosen).close()


def test_lines_run_where_the_user_says_and_showing_asks_nothing(
    stranger: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says(stranger, 'sandbox = "unsafe"')
    assert main(["replay", str(stranger)]) == 0
    assert not mark.exists()
    assert main(["replay", str(stranger), "--verify", "--sandbox", "unsafe"]) == 0
    assert mark.exists()


def test_a_recorded_sandbox_that_isolates_here_keeps_its_options(stranger: Path) -> None:
    says(stranger, 'sandbox = "docker"\n[docker]\nmemory_mb = 512\nisolation = "container"')
    assert RolloutConfig.from_run(stranger).sandbox == Docker(memory_mb=512, isolation="container")
    says(stranger, 'sandbox = "docker"\n[docker]\nmemory_mb = 512\nimage = "evil:1"')
    assert RolloutConfig.from_run(stranger, sandbox="docker").sandbox == Docker(memory_mb=512)
    assert RolloutConfig.from_run(stranger, sandbox="local").sandbox == Local()
    assert RolloutConfig.from_run(stranger, trust=True).sandbox == Docker(memory_mb=512, image="evil:1")


def test_trust_chooses_no_sandbox_that_does_not_isolate(stranger: Path) -> None:
    with pytest.raises(ConfigError, match="--sandbox unsafe"):
        RolloutConfig.from_run(says(stranger, 'sandbox = "unsafe"\ntrust = true'), trust=True)
    assert RolloutConfig.from_run(stranger, trust=True, sandbox="unsafe").sandbox == Unsafe()


def test_a_server_of_a_run_takes_this_machines_sandbox(stranger: Path) -> None:
    says(stranger, 'sandbox = "unsafe"')
    assert ServeConfig(run=stranger).served_config.sandbox == Local()


def test_limits_above_the_default_are_said(stranger: Path, caplog: pytest.LogCaptureFixture) -> None:
    RolloutConfig.from_run_consoles(says(stranger, "[limits]\nmemory_mb = 100000\nprocesses = 2"))
    assert [record.getMessage() for record in caplog.records] == [
        f"limits in {stranger}/config.toml are above the default: memory_mb = 100000 (default 512)"
    ]


CODE = {
    "sampler": 'sampler = "evil_plugin:f"',
    "options of a sampler": "sampler = \"judge_tool(judge='evil_plugin:f')\"",
    "a table of a sampler": '[sampler]\nname = "evil_plugin:f"\ndepth = 1',
    "an option in a table": '[sampler]\nname = "feedback"\ngive = "evil_plugin:f"',
    "host functions": 'host_functions = "llm_query,evil_plugin:f"',
    "judge": 'judge = "task + 0.5*evil_plugin:f"',
    "group judge": 'group_judge = "evil_plugin:f"',
    "a table of host functions": '[host_functions]\n"evil_plugin:f" = true',
    "options of a host function": '[host_functions."evil_plugin:f"]\nmax_calls = 1',
    "a table of judges": '[judges]\ntask = 1\n"evil_plugin:f" = 0.5',
    "a table of group judges": '[group_judges]\n"evil_plugin:f" = 1',
    "judge of the tasks": 'tasks = "rows.jsonl?judge=evil_plugin:f"',
    "an environment": 'tasks = "verifiers:evil_plugin"',
    "a prompt of this machine": 'prompt = "rows.jsonl"',
}


@pytest.mark.parametrize("named", CODE)
def test_code_that_a_run_names_is_not_imported_and_said(
    named: str, stranger: Path, mark: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "t", "question": "q", "answer": "1"}))
    says(stranger, f"trust = true\n{CODE[named]}")
    for command in (["replay", str(stranger), "--branch", "1"], ["serve", "--run", str(stranger), "--port", "0"]):
        assert main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert ("evil_plugin" in line and "--trust" in line) or ("rows.jsonl" in line and "record the text" in line)
    assert main(["replay", str(stranger), "--verify"]) in (0, 1)  # its consoles need nothing of it
    TrajectoryPlayer(stranger).close()
    assert not mark.exists()


SMUGGLED = {
    "a list for a number": 'seed = [0, "--sampler", "evil_plugin:f"]',
    "a list for a switch": 'bos = ["x", "--judge", "evil_plugin:f"]',
    "a list for a text": 'preload = ["json", "--tasks", "verifiers:evil_plugin"]',
    "a list in a table": '[limits]\nmemory_mb = [9, "--prompt", "rows.jsonl"]',
    "a list for a choice": 'overshoot = ["carry", "--group-judge", "evil_plugin:f"]',
    "a list for a kind": 'sandbox = ["local", "--prompt", "rows.jsonl"]',
    "a list for a name with options": 'sampler = ["repl", "--host-functions", "evil_plugin"]',
    "a list for an open table": 'chat = ["a=1", "--sampler", "evil_plugin:f"]',
    "a flag for a switch": 'bos = "--sampler=evil_plugin:f"',
    "help in a list": 'preload = ["x", "--help"]',
    "help for a switch": 'bos = "--help"',
    "help for a number": 'seed = "--help"',
    "an empty list": "seed = []",
    "a switch for a text": "model = true",
}


@pytest.mark.parametrize("smuggled", SMUGGLED)
def test_no_value_of_a_run_becomes_another_setting_or_asks_for_help(
    smuggled: str, stranger: Path, mark: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("read")
    says(stranger, SMUGGLED[smuggled])
    with pytest.raises(ConfigError):
        RolloutConfig.from_run(stranger)
    # The consoles' part is read alone, and has the same checks.
    with suppress(ConfigError):
        assert "read" not in RolloutConfig.from_run_consoles(stranger).prompt
    assert main(["replay", str(stranger), "--branch", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("repl-rl: error: ")
    assert not mark.exists()


@pytest.mark.parametrize(
    "read",
    [
        RolloutConfig(sampler="evil_plugin:f"),
        RolloutConfig(host_functions={"evil_plugin:f": {}}),
        RolloutConfig(judges={"evil_plugin:f": 1.0}),
        RolloutConfig(group_judges={"evil_plugin:f": 1.0}),
        RolloutConfig(tasks="verifiers:evil_plugin"),
        RolloutConfig(prompt="text:read"),
    ],
)
def test_the_config_that_was_read_is_checked_as_its_file_was(read: RolloutConfig) -> None:
    with pytest.raises(ConfigError, match=r"in config.toml is .*(--trust|records another text)"):
        _refuse_unrecorded(read, {"prompt": "bare"}, "config.toml")


@pytest.mark.parametrize("text", ["--help", "--sampler=evil_plugin:f", "-x", "--"])
def test_a_text_of_a_run_that_begins_with_a_hyphen_is_that_text(text: str, stranger: Path) -> None:
    says(stranger, f"[chat]\nkey = {json.dumps(text)}")
    assert RolloutConfig.from_run(stranger) == RolloutConfig(
        chat_template_kwargs={"key": text}, add_bos_token=False, prompt_space="observed"
    )


def test_code_that_a_run_names_is_imported_where_the_user_trusts_it(stranger: Path, mark: Path) -> None:
    says(stranger, 'group_judge = "evil_plugin:f"')
    world = RolloutConfig.from_run(stranger, trust=True)
    assert not mark.exists()
    world.load_sampler_and_renderer()
    assert mark.exists()


def test_a_validation_source_of_a_run_is_held_to_the_same(stranger: Path, mark: Path) -> None:
    says(stranger, 'validation = "verifiers:evil_plugin"')
    with pytest.raises(ConfigError, match=r"tasks in .*verifiers:evil_plugin.*--trust"):
        find_recorded_task(stranger, "t", RolloutConfig.from_run(stranger))
    assert not mark.exists()


ROWS: dict[str, dict[str, object]] = {
    "judge": {"judge": "evil_plugin:f"},
    "weighed": {"judge": "numeric + 0.1*evil_plugin:f"},
    "follow-up": {"follow_ups": [{"question": "q", "answer": "1", "judge": "evil_plugin:f"}]},
}


@pytest.mark.parametrize("row", ROWS)
def test_a_judge_of_a_row_is_imported_only_if_the_user_names_it(
    row: str, tmp_path: Path, mark: Path, stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"id": "t", "question": "q", "answer": "1", **ROWS[row]}) + "\n")
    for verb in ("rollout", "eval", "train"):
        assert main([verb, "--tasks", str(file), "--engine", "transformers"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{file}:1: judge is 'evil_plugin:f'; it would be imported" in line
        assert "--judges evil_plugin:f" in line
        assert "--trust" in line
    with pytest.raises(ConfigError, match="trust=True"):
        load_tasks(str(file))
    assert not mark.exists()
    assert load_tasks(str(file), trust=True) == load_tasks(str(file), judges=["evil_plugin:f"])
    assert RolloutConfig(tasks=str(file), trust=True).draw_tasks("all") == load_tasks(str(file), trust=True)
    assert RolloutConfig(tasks=str(file), judges={"task": 1.0, "evil_plugin:g": 0.5}, trust=True).draw_tasks("all")
    assert RolloutConfig(tasks=str(file), judges={"exact": 1.0}).draw_tasks("all")[0].judge == "exact"


def test_a_judge_that_the_user_names_is_the_users(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"id": "t", "question": "q", "answer": "1", "judge": "evil_plugin:f"}) + "\n")
    assert RolloutConfig(tasks=str(file), judges={"evil_plugin:f": 1.0}).draw_tasks("all")[0].judge == "evil_plugin:f"
    assert RolloutConfig(tasks=f"{file}?judge=mine_plugin:f").draw_tasks("all")[0].judge == "mine_plugin:f"
    with pytest.raises(ConfigError, match="evil_plugin:f"):
        RolloutConfig(tasks=str(file), judges={"task": 1.0, "mine_plugin:f": 0.5}).draw_tasks("all")


def test_trust_is_of_one_command_and_never_recorded() -> None:
    assert "trust" not in dump_toml(TrainConfig(trust=True))
    assert dump_toml(TrainConfig(trust=True)) == dump_toml(TrainConfig())


OPTIONAL = ("gmpy2", "tree", "wandb", "logging", "json", "random", "tabulate", "pip", "sitecustomize")
"""Modules that libraries try to import, and modules of the standard library."""


def program(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).with_name("repl-rl")
    return subprocess.run([command, *arguments], cwd=folder, text=True, capture_output=True, stdin=subprocess.DEVNULL)


def test_programs_that_the_command_starts_do_not_import_from_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "stranger.py").write_text("print('it ran')")
    code = (
        "import subprocess, sys\n"
        "from repl_rl.cli import run\n"
        "sys.argv[1:] = ['--help']\n"
        "try:\n"
        "    run()\n"
        "except SystemExit:\n"
        "    sys.exit(subprocess.run([sys.executable, '-c', 'import stranger']).returncode)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "it ran" not in done.stdout
    assert "No module named 'stranger'" in done.stderr


def test_no_file_of_the_working_folder_runs_that_nobody_named(stranger: Path, tmp_path: Path, mark: Path) -> None:
    desk = tmp_path / "desk"
    desk.mkdir()
    for name in OPTIONAL:
        (desk / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    (desk / "tasks.jsonl").write_text(json.dumps({"id": "t", "question": "q", "answer": "1/2", "judge": "math"}) + "\n")
    says(stranger, "")
    assert program(desk, "replay", str(stranger)).returncode == 0
    played = program(
        desk, "eval", "--tasks", "tasks.jsonl", "--split", "all", "--engine", "transformers", "--no-greedy"
    )
    assert played.returncode == 0, played.stderr
    assert not mark.exists()


def test_a_judges_process_looks_into_no_folder_for_modules_of_the_library(tmp_path: Path, mark: Path) -> None:
    for name in OPTIONAL:
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\nraise SystemExit\n")
    grade = (
        "from repl_rl.judges import grade_answer; from repl_rl import Task\n"
        "print(grade_answer(Task('t', 'q', '3', judge='math'), '3'))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", grade], cwd=tmp_path, text=True, capture_output=True)
    assert done.stdout == "1.0\n", done.stderr
    assert not mark.exists()


def test_modules_that_the_user_names_are_found_here_with_their_neighbours(tmp_path: Path) -> None:
    package = tmp_path / "own_plugin"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text(
        "import own_helper\nfrom . import near\n"
        "def judge(task, answer):\n    import late_helper\n    return own_helper.ONE * near.ONE * late_helper.ONE\n"
    )
    (package / "near.py").write_text("ONE = 1.0\n")
    (tmp_path / "own_helper.py").write_text("import importlib\nONE = importlib.import_module('deep_helper').ONE\n")
    (tmp_path / "deep_helper.py").write_text("ONE = 1.0\n")
    (tmp_path / "late_helper.py").write_text("ONE = 1.0\n")
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"id": "t", "question": "q", "answer": "1"}) + "\n")
    ask = (
        "from repl_rl.judges import grade_answer; from repl_rl import Task\n"
        "print(grade_answer(Task('t', 'q', '3', judge='own_plugin.inner:judge'), '3'))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", ask], cwd=tmp_path, text=True, capture_output=True)
    assert done.stdout == "1.0\n", done.stderr


def test_a_library_finds_nothing_of_the_working_folder_even_beside_a_named_module(
    tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "site" / "library_of_evil.py"
    library.parent.mkdir()
    library.write_text("try:\n    import neighbour_of_evil\nexcept ImportError:\n    pass\n")
    (tmp_path / "neighbour_of_evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    (tmp_path / "uses_plugin.py").write_text("import library_of_evil\nf = str\n")
    monkeypatch.syspath_prepend(library.parent)
    finder = WorkingFolderFinder()
    finder.request_module("uses_plugin")
    sys.meta_path.append(finder)
    try:
        __import__("uses_plugin")
    finally:
        sys.meta_path.remove(finder)
    assert "library_of_evil" in sys.modules
    assert not mark.exists()


def test_every_python_that_the_package_starts_ignores_the_working_folder() -> None:
    """`-P`, `-I`, or a script, whose own folder comes first."""
    found = []
    for path in sorted((ROOT / "repl_rl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.List | ast.Tuple):
                words = [ast.unparse(each) for each in node.elts]
                found += [
                    (path.name, words[at + 1])
                    for at, word in enumerate(words[:-1])
                    if word == "sys.executable" and words[at + 1] in ("'-c'", "'-m'")
                ]
    assert found == []


def test_a_kind_that_is_chosen_by_default_is_never_refused() -> None:
    for kind in SANDBOXES.entries.values():
        if kind.isolates and not kind.is_remote:
            kind().validate_recorded_choice("config.toml")

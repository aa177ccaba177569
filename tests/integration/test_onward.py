"""The first minutes: what `repl-rl` says to do next. That it runs as it is printed: `test_printed_commands.py`."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from repl_rl.cli import VERBS, main
from repl_rl.cli.next_steps import (
    NextStep,
    print_steps,
    suggest_demonstrations,
    suggest_next_steps,
    suggest_resume,
)
from repl_rl.cli.sft import SftConfig
from repl_rl.cli.train import TrainConfig
from repl_rl.cli.transcripts import TranscriptsConfig
from repl_rl.errors import ConfigError
from repl_rl.runs.list_runs import read_run_info
from repl_rl.settings.argument_parser import parse
from repl_rl.utils.file_lock import lock_folder
from repl_rl.utils.package_data import add_checkout_to_path


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begun(name: str, more: str = "", /, **summary: object) -> Path:
    run = Path("runs", name)
    run.mkdir(parents=True)
    run.joinpath("config.toml").write_text(f'name = "{name}"\nout = "runs"\n{more}\n[trainer]\nsteps = 9\n')
    run.joinpath("metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    if summary:
        run.joinpath("summary.json").write_text(json.dumps(summary))
    return run


def said(capsys: pytest.CaptureFixture[str]) -> tuple[str, list[str]]:
    """What the program says alone: its first line, and the commands that it names."""
    assert main([]) == 0
    head, *rest = capsys.readouterr().out.splitlines()
    if rest[0].startswith("  "):
        return head, named(rest)
    return "", named([head, *rest])


def named(lines: list[str]) -> list[str]:
    return [line.strip().partition("   ")[0].partition("  ")[0] for line in lines if line.startswith("  ")]


def test_where_there_is_no_run_it_says_how_to_train_one(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, commands = said(capsys)
    assert "no run yet" in head
    assert [command.split()[1] for command in commands] == ["train", "doctor", "--help"]
    assert not [*desk.iterdir()]


def test_a_finished_run_is_to_be_looked_at_replayed_and_served(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun("mine", status="finished", steps=2, solve_rate_first=0.2, solve_rate_last=0.9)
    assert said(capsys) == (
        "runs/mine is finished: 90.0% solved, 20.0% before.",
        ["repl-rl view runs/mine", "repl-rl replay runs/mine", "repl-rl serve --run runs/mine", "repl-rl --help"],
    )


@pytest.mark.parametrize(
    ("summary", "told"),
    [
        ({"status": "interrupted", "error": "Terminated: 15"}, "runs/mine was interrupted after step 2 of 9."),
        (
            {"status": "failed", "error": "EngineDied: gone\x1b[2J"},
            "runs/mine failed after step 2 of 9: EngineDied: go",
        ),
        ({}, "runs/mine was killed after step 2 of 9."),
    ],
)
def test_a_run_that_stopped_is_to_be_gone_on_with(
    desk: Path, capsys: pytest.CaptureFixture[str], summary: dict[str, object], told: str
) -> None:
    begun("mine", **summary)
    head, commands = said(capsys)
    assert head.startswith(told)
    assert "\x1b" not in head
    assert commands == [
        "repl-rl train --config runs/mine/config.toml --resume", "repl-rl view runs/mine", "repl-rl --help",
    ]  # fmt: skip


def test_a_run_that_is_under_way_is_to_be_followed(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun("newer", status="finished")
    with lock_folder(begun("mine")):
        head, commands = said(capsys)
    assert head == "runs/mine is at step 2 of 9."
    assert commands == ["repl-rl view runs/mine --serve", "repl-rl runs", "repl-rl --help"]


def test_what_is_broken_or_no_run_is_passed_over(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun("torn").joinpath("summary.json").write_text("{")
    Path("runs", "notes").mkdir()
    head, commands = said(capsys)
    assert "no run yet" in head
    assert commands


def test_a_run_of_python_is_not_said_to_be_gone_on_with_by_a_command(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun("mine").joinpath("config.toml").write_text("[trainer]\nsteps = 9\n")
    assert said(capsys)[1] == ["repl-rl view runs/mine", "repl-rl --help"]


def test_a_run_is_gone_on_with_where_it_lies_now_by_as_many_processes_as_began_it(desk: Path) -> None:
    run = begun("mine", "overwrite = true", status="interrupted", processes=2)
    moved = run.rename("a folder")
    assert suggest_resume(read_run_info(moved)).command == (
        "torchrun --nproc-per-node 2 -m repl_rl.cli train --config 'a folder/config.toml' --resume --no-overwrite "
        "--out . --name 'a folder'"
    )


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ('sampler = "my_samplers:patient"', "sampler"),
        (
            'group_judges = "mine:f"\nhost_functions = "mine:g"',
            "group_judges.mine:f, host_functions.mine:g",
        ),
        ('tasks = "verifiers:mine"\nprompt = "/etc/passwd"', "tasks, prompt"),
        ('sandbox = "unsafe"', "sandbox"),
        ('sandbox = "docker"\n[docker]\nimage = "another"', "sandbox"),
        ('[trainer.line_rewards]\n"mine:reward" = 0.1', "trainer.line_rewards.mine:reward"),
        ('[trainer]\nestimator = "mine:estimate"', "trainer.estimator"),
        ('[trainer]\n"odd\\u001b[2J" = "mine:x"', "trainer.odd"),
        ('sandbox = "docker"\ntasks = "builtin:count"\nmodel = "gguf:x"\n[trainer]\nestimator = "outcome"', ""),
    ],
)
def test_going_on_with_what_may_be_a_strangers_run_says_what_it_obeys(
    desk: Path, settings: str, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = settings if "[trainer]" in settings else f"{settings}\n[trainer]"
    begun("mine").joinpath("config.toml").write_text(f'name = "mine"\nout = "runs"\n{trained}\nsteps = 9\n')
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    (line,) = [line for line in shown.splitlines() if "--resume" in line]
    _, _, told = line.partition("resume it where it stopped")
    assert told.startswith(f"; for a run of your own alone: it obeys the run's {names}" if names else "")
    assert bool(told) is bool(names)


def test_a_server_is_told_of_the_runs_engine_and_sandbox_where_they_are_not_the_usual_ones(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def third(**settings: object) -> str:
        return suggest_next_steps(Path("runs/it's"), settings)[2].command

    assert third(engine="vllm", sandbox="local") == "repl-rl serve --run 'runs/it'\"'\"'s'"
    assert third(engine="transformers", sandbox="docker").endswith(" --engine transformers --sandbox docker")
    assert "--sandbox" not in third(sandbox="gateway")
    monkeypatch.setattr("repl_rl.cli.next_steps.find_spec", lambda name: None)
    assert third() == "repl-rl replay 'runs/it'\"'\"'s' --branch 4"


def test_flags_that_allow_something_are_printed_for_a_run_of_ones_own_alone() -> None:
    settings = {"sandbox": "unsafe", "sampler": "my_samplers:patient"}
    mine = [step.command for step in suggest_next_steps(Path("runs/mine"), settings, mine=True)]
    listed = [step.command for step in suggest_next_steps(Path("runs/mine"), settings)]
    assert mine[1] == "repl-rl replay runs/mine --sandbox unsafe"
    assert mine[2].endswith(" --sandbox unsafe --trust")
    assert not any("unsafe" in command or "--trust" in command for command in listed)
    assert not any(
        "--trust" in step.command for step in suggest_next_steps(Path("runs/mine"), {"sampler": "repl"}, mine=True)
    )


def test_what_to_do_next_is_said_at_once(desk: Path) -> None:
    code = (
        "import sys; from repl_rl.cli import main; main([]); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)


def test_help_names_every_verb_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(VERBS)


def test_a_command_is_never_wrapped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_steps(Console(), [NextStep("repl-rl view " + "x" * 80, "look"), NextStep("repl-rl [b]", "[i]")])
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown] == [["repl-rl", "view"], ["repl-rl", "[b]"]]


def test_the_commands_for_demonstrations_are_accepted_and_hand_on_their_folders() -> None:
    steps = [shlex.split(step.command) for step in suggest_demonstrations("my model", "my tasks.jsonl")]
    assert [words[1] for words in steps] == ["transcripts", "sft", "train"]
    made = parse(TranscriptsConfig, "transcripts", steps[0][2:])
    learned = parse(SftConfig, "sft", steps[1][2:])
    trained = parse(TrainConfig, "train", steps[2][2:])
    assert (made.model, learned.model) == ("my model", "my model")
    assert [str(path) for path in learned.data] == [str(made.out)]
    assert (trained.model, trained.tasks) == (str(learned.out), "my tasks.jsonl")


def test_benchmarks_are_refused_where_there_is_no_checkout(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only a checkout of repl_rl has them"):
        add_checkout_to_path(tmp_path)

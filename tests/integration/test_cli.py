"""Bad input: one line that names thing, value and remedy, exit code 2, and nothing written."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

import repl_rl.cli
from repl_rl.cli import _format_os_error, main
from repl_rl.cli.terminal_output import make_terminal
from repl_rl.cli.train import TrainConfig
from repl_rl.engine import Vllm
from repl_rl.errors import ConfigError
from repl_rl.runs.store import escape_control_characters
from repl_rl.settings.argument_parser import dump_toml, parse
from repl_rl.utils.package_data import find_asset
from tests.support.tokenizers import overshooting_tokenizer
from tests.support.trainer.tiny_policies import tiny_model


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, *flags: str) -> str:
    """Run `train` with bad input; return its one line of error."""
    capsys.readouterr()  # what the test itself printed before
    code = main(["train", "--out", str(tmp_path / "runs"), *flags])
    error = capsys.readouterr().err.strip()
    assert code == 2
    assert len(error.splitlines()) == 1, error
    assert error.startswith("repl-rl: error: ")
    assert not (tmp_path / "runs").exists()
    return error


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--model", "/no/such/model"), ["model folder", "/no/such/model", "give a folder"]),
        (("--tasks", "/no/such/tasks.jsonl"), ["/no/such/tasks.jsonl"]),
        (("--trainer.group-size", "1"), ["group_size is 1", "at least 2 rollouts"]),
        (("--learning-rat", "1"), ["unknown option", "--learning-rat", "did you mean"]),
        (("--sampler", "nope"), ["sampler is 'nope'", "repl"]),
        (("--prompt", "nope"), ["prompt is 'nope'", "choose one of bare, base"]),
        (("--sampler", "feedback"), ["chat template of", "use a chat model for this sampler"]),
        (
            ("--chat-template-kwargs.enable-thinking", "false"),
            ["chat_template_kwargs.enable_thinking is False", "does not read it"],
        ),
        (("--sampler", "json:JSONDecoder"), ["json:JSONDecoder", "subclass of repl_rl.RolloutSampler"]),
        (("--rollout.max-lines", "0"), ["max_lines is 0", "at least 1"]),
        (("--concurrency", "0"), ["concurrency is 0"]),
        (("--limits.memory-mb", "1"), ["limits.memory_mb is 1"]),
        (("--docker.runtime", "runsc"), ["runsc", "no effect without --sandbox docker"]),
        (("--sandbox", "docker", "--docker.memory-mb", "1"), ["docker.memory_mb is 1", "at least 256"]),
        (("--config", "/no/such.toml"), ["config file", "/no/such.toml"]),
        (("--seed", "x"), ["'--out", "--seed x'", "invalid literal", "repl-rl train --help"]),
        (("--seed", "99999999999999999999"), ["seed is 99999999999999999999", "at most 4,294,967,295"]),
        (("--trainer.learning-rate", "inf"), ["learning_rate is inf", "at most 4,294,967,295"]),
        (("--limits.memory-mb", "4611686018427387904"), ["limits.memory_mb is 4611686018427387904", "at most"]),
        (("--engine", "server"), ["engine is 'server'", "choose one of vllm, transformers"]),
        (("--sandbox", "moon"), ["sandbox is 'moon'", "choose one of local, docker, gateway, unsafe, nodes"]),
        (("--vllm.request-mode", "stream"), ["invalid choice 'stream'", "'session', 'request'"]),
        (("--engine", "transformers", "--vllm.sleep"), ["sleep=True", "no effect without --engine vllm"]),
        (("--sampler", "repl(patience=3)"), ["option patience of sampler repl is 3", "max_error_streak, candidates"]),
        (("--sampler", "repl(max_error_streak=9)"), ["max_error_streak is 9", "2 to max_lines (8)"]),
        (("--sampler", "fenced(max_error_streak=3)"), ["option max_error_streak of sampler fenced is 3"]),
        (("--preset", "nosuch"), ["preset is 'nosuch'", "choose", "pretrained"]),
        (("--preset",), ["option is '--preset'", "pretrained"]),
        (("--trainer.estimator", "outcome(line_weight=0.5)"), ["line_weight of estimator outcome", "0.5"]),
    ],
)
def test_bad_values_are_named_with_a_remedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: tuple[str, ...], parts: list[str]
) -> None:
    error = refused(capsys, tmp_path, *flags)
    for part in parts:
        assert part in error, error


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("view", ["Missing", "Run folder", "repl-rl view --help"]),
        ("replay /no/such --to-line -1", ["to_line is -1", "at least 0"]),
        ("replay /no/such --branch x", ["--branch x", "invalid literal"]),
        ("sft --data /no/such --out {}/policy", ["data is '/no/such'", "no such folder or file"]),
        ("sft --fresh --learning.learning-rate inf --out {}/policy", ["learning_rate is inf", "at most"]),
        ("sampler check repl --model /no/such", ["model folder is '/no/such'", "and tokenizer"]),
        ("sampler check repl --prompt nope", ["prompt is 'nope'", "few_shot"]),
        ("bench update --json /no/such/figures.json", ["/no/such/figures.json", "no such folder"]),
        ("transcripts --from-tasks builtin:dates --sandbox inprocess --out /dev/null/x", ["'/dev/null/x'", "another"]),
    ],
)
def test_every_verb_answers_a_mistake_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, parts: list[str]
) -> None:
    assert main(shlex.split(command.format(tmp_path))) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("repl-rl: error: ")
    assert not [part for part in parts if part not in error], error
    assert not [*tmp_path.iterdir()]


def test_several_processes_must_share_a_step_evenly(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    odd = ("--trainer.prompts-per-step", "3", "--trainer.group-size", "3")
    assert "2 processes must share them evenly" in refused(capsys, tmp_path, *odd)


def tasks_file(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(lines) + "\n" if lines else "")
    return str(path)


GOOD = json.dumps({"id": "a", "question": "What is 1 + 1?", "answer": "2"})


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ((GOOD, "{nonsense"), ["tasks.jsonl:2", "JSON"]),
        ((GOOD, json.dumps({"id": "b", "question": "q"})), ["tasks.jsonl:2", "answer"]),
        ((GOOD, GOOD), ["tasks.jsonl:2", "'a'"]),
        ((GOOD,), ["tasks.jsonl", "held_out", "1 questions all fall into the other part"]),
        ((GOOD, GOOD.replace('"a"', '"b"').replace("+ 1", "+ 3")), ["training tasks is 1", "prompts-per-step"]),
        ((), ["tasks.jsonl"]),
    ],
)
def test_bad_tasks_files_are_named_with_their_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, lines: tuple[str, ...], parts: list[str]
) -> None:
    error = refused(capsys, tmp_path, "--tasks", tasks_file(tmp_path, *lines))
    for part in parts:
        assert part in error, error


def test_an_unknown_key_of_a_toml_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[trainer]\nlerning_rate = 1.0\n")
    error = refused(capsys, tmp_path, "--config", str(file))
    assert "trainer.lerning_rate" in error
    assert "did you mean 'trainer.learning_rate'" in error


def test_a_config_file_that_is_not_toml_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("= nothing")
    assert "it is not TOML" in refused(capsys, tmp_path, "--config", str(file))


def test_a_model_folder_without_a_tokenizer_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    error = refused(capsys, tmp_path, "--model", str(tmp_path / "model"), "--engine", "transformers")
    assert "without tokenizer" in error


def test_a_vocabulary_refused_by_the_audit_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny_model(vocab=512).save_pretrained(tmp_path / "model")
    overshooting_tokenizer().save_pretrained(tmp_path / "model")
    flags = ("--model", str(tmp_path / "model"), "--engine", "transformers", "--newline-tokens", "refuse")
    error = refused(capsys, tmp_path, *flags)
    assert "text after a newline" in error
    assert "--newline-tokens forbid" in error


def test_without_bubblewrap_the_local_sandbox_is_refused_with_its_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["train", "--out", str(tmp_path / "runs"), "--engine", "transformers"]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("repl-rl: error")]
    assert len(error) == 1
    assert "bubblewrap" in error[0]
    assert "unsafe" in error[0]
    assert not (tmp_path / "runs").exists()


def test_an_existing_run_is_kept_unless_it_may_be_overwritten(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = tmp_path / "runs" / "mine" / "summary.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    assert main(["train", "--out", str(tmp_path / "runs"), "--name", "mine"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert kept.read_text() == "{}"


def test_a_written_config_reads_back_equal(tmp_path: Path) -> None:
    flags = ["--preload", "a\\b\n\té\x7f"]
    flags += ["--name", 'a "b"', "--trainer.steps", "7", "--overwrite", "--limits.line-timeout-s", "1.5"]
    config = parse(TrainConfig, "train", flags)
    file = tmp_path / "c.toml"
    file.write_text(dump_toml(config))
    assert parse(TrainConfig, "train", ["--config", str(file)]) == config


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('name = "file"\noverwrite = true\n[trainer]\nsteps = 3\n')
    config = parse(TrainConfig, "train", ["--config", str(file), "--trainer.steps", "9", "--no-overwrite"])
    assert (config.name, config.trainer.steps, config.overwrite) == ("file", 9, False)


def test_flags_win_over_the_file_and_the_file_wins_over_the_preset(tmp_path: Path) -> None:
    presets = tmp_path / "presets"
    presets.mkdir()
    (presets / "mine.toml").write_text('name = "preset"\nprompt = "chat"\n[trainer]\nsteps = 3\n')
    file = tmp_path / "c.toml"
    file.write_text('name = "file"\n[trainer]\nsteps = 5\n')
    flags = ["--trainer.steps", "9", "--config", str(file), "--preset=mine"]
    config = parse(TrainConfig, "train", flags, presets)
    assert (config.prompt, config.name, config.trainer.steps) == ("chat", "file", 9)
    (presets / "mine.toml").write_text("promt = 1\n")
    with pytest.raises(ConfigError, match=r"key in .*mine.toml is 'promt'; did you mean 'prompt'"):
        parse(TrainConfig, "train", flags, presets)


def test_every_shipped_preset_is_accepted_and_named_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    names = [file.stem for file in find_asset("presets").glob("*.toml")]
    assert sorted(names) == ["gpu", "pretrained", "quickstart"]
    for name in names:
        assert name in shown
        config = parse(TrainConfig, "train", ["--preset", name], find_asset("presets"))
        # The preset of the bundled policy spells its defaults out.
        assert (config == TrainConfig()) == (name == "quickstart")


def test_the_preset_for_a_gpu_leaves_the_trainer_memory_and_plays_a_step_at_once() -> None:
    config = parse(TrainConfig, "train", ["--preset", "gpu"], find_asset("presets"))
    assert config.engine == Vllm(kv_cache_gib=8, sleep=True)
    assert config.concurrency == config.trainer.prompts_per_step * config.trainer.group_size
    assert config.trainer.compute_batch_shape(1) == (8, 16)


def test_only_train_has_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--preset", "pretrained"]) == 2
    assert "unknown option is '--preset'" in capsys.readouterr().err


def test_an_unknown_verb_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "verb is 'trian'" in capsys.readouterr().err


def test_a_working_folder_that_was_removed_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    verb = f"cd gone && rmdir ../gone && exec {sys.executable} -m repl_rl.cli rollout --count 1"
    env = {**os.environ, "PYTHONPATH": str(Path(repl_rl.__file__).parent.parent)}
    done = subprocess.run(["sh", "-c", verb], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "repl-rl: error: working folder is 'removed'; change to a folder that exists\n"


def test_a_python_without_docstrings_is_refused_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "repl_rl.cli", "eval"],
        env={**os.environ, "PYTHONOPTIMIZE": "2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "unset PYTHONOPTIMIZE" in done.stderr


@pytest.mark.parametrize("verb", ["train", "eval", "rollout", "doctor"])
def test_every_verb_has_help(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    assert f"repl-rl {verb}" in capsys.readouterr().out


def test_terminal_control_codes_are_made_visible() -> None:
    assert escape_control_characters("\x1b[2Jok\t\u202e\n\0") == "\\x1b[2Jok\t\\u202e\n\\x00"


def test_what_is_printed_is_text_and_names_in_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("remedy [a]", title="[b] on 2 tasks")
    table.add_row("pip install 'repl_rl[ray]' [/]")
    make_terminal().print(table)
    make_terminal().print("[red]as it is")
    said = capsys.readouterr().out
    assert all(text in said for text in ("remedy [a]", "[b] on 2 tasks", "'repl_rl[ray]' [/]", "[red]as it is"))


def test_every_verb_prints_by_way_of_the_terminal() -> None:
    sources = {path.name: path.read_text() for path in Path(repl_rl.cli.__file__).parent.rglob("*.py")}
    makers = [name for name, source in sources.items() if re.search(r"\b(Console|_RichTerminal)\(", source)]
    assert makers == ["terminal_output.py"]


def test_output_that_nobody_reads_ends_a_verb_without_a_word(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "repl_rl.cli", "sampler", "check", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), "No space left on device; free some room there"),
        (
            OSError(24, "Too many open files", "/a/file"),
            "file is '/a/file'; Too many open files; give this process more",
        ),
        (RuntimeError("unable to open file </m>: Too many open files (24)"), "Too many open files (24); give this"),
        (OSError(2, "No such file", "/a/file"), "file is '/a/file'; No such file; give another path"),
    ],
)
def test_what_the_system_refuses_is_one_line_with_a_remedy(error: Exception, told: str) -> None:
    assert told in (_format_os_error(error) or "")


def test_an_error_of_ours_is_not_taken_for_one_of_the_system() -> None:
    assert _format_os_error(RuntimeError("a bug")) is None
    assert _format_os_error(OSError("a bug")) is None

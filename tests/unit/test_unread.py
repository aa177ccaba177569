"""An option that a command does not read in its mode is refused in one line, before anything is read or written."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import pytest

from repl_rl.cli import chat, main, replay, serve, sft, transcripts
from repl_rl.errors import ConfigError
from repl_rl.rollout_config import RolloutConfig
from repl_rl.settings.argument_parser import ParsedSettings, dump_toml, parse_with_sources

PLAYS = ("--tasks builtin:count", "--judges task", "--engine vllm", "--vllm.sleep", "--sandbox local", "--trust",
         "--sampler repl", "--sampler.max-error-streak 3", "--concurrency 128", "--dtype auto", "--rollout.max-lines 9",
         "--limits.cpu-s 9", "--train-tasks 7")  # fmt: skip
UNREAD = {
    "sft --fresh": (
        *("--model nosuch/model@x", "--train-tasks 7", "--learn-errors", "--learning.steps 5", "--samples 0"),
        *("--per-task 1", "--prompt bare", "--chat-template-kwargs.key 1", "--data nosuch", *PLAYS),
    ),
    "sft --data nosuch": PLAYS,
    "sft --samples 1": ("--kv-on-sync drop",),
    "transcripts --from-doctests bisect": ("--count 1000", "--mix cold", "--protocol line", "--seed 0"),
    "transcripts --from-tasks builtin:count": ("--max-lines 32", "--preload", "--no-preload"),
    "replay nosuch": ("--sandbox nosuch", "--trust", "--model m", "--engine vllm", "--temperature 1.0"),
    "replay nosuch --to-line 1": ("--model m", "--engine vllm", "--temperature 1.0"),
    "replay nosuch --verify": ("--to-line 0", "--model m", "--engine vllm", "--temperature 1.0"),
    "replay nosuch --export e1.txt": ("--sandbox docker", "--trust", "--to-line 0", "--model m", "--temperature 1.0"),
    "replay nosuch.ipynb": ("--id 0-t-1",),
    "serve": ("--tasks builtin:quickstart", "--judges task", "--kv-on-sync keep", "--kv-on-sync drop", "--trust"),
    "serve --run nosuch": (
        *("--prompt bare", "--model builtin:quickstart", "--add-bos-token", "--sampler repl"),
        "--sampler.max-error-streak 3",
        *("--chat-template-kwargs.key 1", "--limits.cpu-s 9", "--rollout.max-lines 9", "--kv-on-sync keep"),
    ),
    "eval": ("--kv-on-sync keep", "--kv-on-sync drop"),
    "rollout": ("--kv-on-sync keep",),
    "sampler check repl": ("--newline-tokens carry", "--prompt-space auto"),
    "chat": ("--tasks builtin:quickstart", "--group-judges m:f", "--trust", "--kv-on-sync keep"),
    "chat --server http://127.0.0.1:1/v1": (
        *("--model builtin:quickstart", "--add-bos-token", "--concurrency 1", "--engine vllm", "--vllm.sleep"),
        *("--docker.image i", "--chat-template-kwargs.key 1", "--seed 0", "--limits.cpu-s 9"),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    yield
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("command", "flags"), [(command, flags) for command, all in UNREAD.items() for flags in all])
def test_an_option_that_its_mode_does_not_read_is_refused_by_name_even_with_its_default(
    command: str, flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--sandbox", "docker"] if "--docker" in flags else []
    assert main([*command.split(), *flags.split(), *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    name = flags.split()[0].removeprefix("--").removeprefix("no-").replace("-", "_")
    setting = name.partition(".")[0] if name.partition(".")[0] in ("sampler", "chat_template_kwargs") else name
    assert line.startswith(f"repl-rl: error: {setting} is ")
    assert "leave" in line


def refuse_unread(verb: str, flags: Sequence[str]) -> None:
    """Refuse what the verb does not read, as its first step does."""
    match verb:
        case "sft":
            sft.refuse_without_effect(parse_with_sources(sft.SftConfig, verb, flags))
        case "transcripts":
            transcripts.refuse_without_effect(parse_with_sources(transcripts.TranscriptsConfig, verb, flags))
        case "replay":
            replay.refuse_without_effect(parse_with_sources(replay.ReplayConfig, verb, flags))
        case "serve":
            serve.refuse_without_effect(parse_with_sources(serve.ServeConfig, verb, flags))
        case _:
            chat.refuse_without_effect(parse_with_sources(chat.ChatConfig, verb, flags))


@pytest.mark.parametrize("command", [
    "sft --fresh --seed 1 --out new --overwrite",
    "sft --data d --learn-errors --per-task 2 --seed 1 --prompt bare --prompt-space auto --learning.steps 5 --model m",
    "sft --samples 2 --train-tasks 7 --tasks builtin:count --engine vllm --vllm.sleep --limits.cpu-s 9 --trust",
    "transcripts --from-doctests bisect --max-lines 9 --no-preload --max-tokens 99 --limits.cpu-s 9",
    "transcripts --from-tasks builtin:count --mix cold --protocol fenced --count 7 --seed 1",
    "transcripts --from-tasks builtin:count --from-doctests bisect --mix cold --max-lines 9",
    "replay f --id 0-t-1",
    "replay f --to-line 0 --sandbox docker --trust",
    "replay f --verify --id 0-t-1 --sandbox docker --trust",
    "replay f --export e.txt --id 0-t-1",
    "replay f --branch 2 --to-line 1 --sandbox docker --engine vllm --model m --temperature 0 --trust",
    "serve --prompt base --engine vllm --dtype auto --sandbox docker --limits.cpu-s 9",
    "serve --run r --trust --engine vllm --sandbox docker --seed 1 --concurrency 2 --name n",
    "chat --prompt base --temperature 1 --engine vllm --sampler repl",
    "chat --server http://127.0.0.1:1/v1 --temperature 0",
])  # fmt: skip
def test_options_that_a_mode_reads_are_taken(command: str) -> None:
    verb, *flags = command.split()
    refuse_unread(verb, flags)


def test_the_file_of_earlier_transcripts_is_taken_because_its_other_values_are_defaults(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    file = tmp_path_factory.mktemp("earlier") / "config.toml"
    file.write_text(dump_toml(transcripts.TranscriptsConfig(from_doctests=("bisect",), max_lines=9)))
    refuse_unread("transcripts", ["--config", str(file)])
    file.write_text(file.read_text().replace('mix = "clean"', 'mix = "cold"'))
    with pytest.raises(ConfigError, match="mix is 'cold'; it has no effect without --from-tasks"):
        refuse_unread("transcripts", ["--config", str(file)])


def test_a_server_that_is_asked_leaves_no_setting_of_a_world_to_this_command() -> None:
    asked: ParsedSettings[chat.ChatConfig] = parse_with_sources(
        chat.ChatConfig, "chat", ["--server", "http://127.0.0.1:1/v1"]
    )
    for field in fields(RolloutConfig):
        given = ParsedSettings(asked.config, (), frozenset({field.name}), asked.with_defaults)
        with pytest.raises(ConfigError, match="the server has its own settings"):
            chat.refuse_without_effect(given)

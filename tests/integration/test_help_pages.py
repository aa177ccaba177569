"""Help at two levels: `--help` shows the common options and a line per table, `--help-all` shows every option."""

import re

import pytest

from repl_rl.cli import main
from repl_rl.cli.train import TrainConfig
from repl_rl.settings.argument_parser import build_flags_class, iterate_flag_names, parse
from repl_rl.settings.help_pages import MOST_SHOWN, get_common_names
from scripts.site.settings import commands, settings

LONG = {
    command: kind
    for command, kind in commands().items()
    if len([*iterate_flag_names(build_flags_class(kind))]) > MOST_SHOWN
}
"""Commands with options that their first level does not show."""


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    assert end.value.code == 0
    return capsys.readouterr().out


def options(text: str) -> list[str]:
    """The options that a help has boxes for, as names of settings; the help itself is none."""
    found = re.findall(r"^(?:│ |  )--([\w.-]+)", text, re.MULTILINE)
    return [name.replace("-", "_") for name in found if name != "help"]


def test_the_commands_with_many_options_are_known() -> None:
    assert {*LONG} == {"train", "eval", "rollout", "serve", "chat", "transcripts", "sft"}


@pytest.mark.parametrize("command", LONG)
def test_the_first_level_has_at_most_thirty_options_and_names_all_others(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = shown(capsys, command, "--help")
    first, names = options(text), [*iterate_flag_names(build_flags_class(LONG[command]))]
    assert len(first) <= MOST_SHOWN
    assert {*first} == get_common_names(LONG[command])
    others = text.partition("more options: ")[2]
    assert f"repl-rl {command} --help-all" in others
    tables = re.split(r"\n  (?! )", others)[1:]
    listed = [
        f"{'' if table == 'of no table' else f'{table}.'}{name}".replace("-", "_")
        for table, _, text in (line.partition(": ") for line in tables)
        for name in text.replace(",", " ").split()
    ]
    assert sorted([*first, *listed]) == sorted(names)


@pytest.mark.parametrize("command", [command for command in commands() if command != "sampler check"])
def test_the_second_level_has_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [each.word for table in settings(commands()[command]).values() for each in table]
    told = shown(capsys, *command.split(), "--help-all")
    assert "more options: " not in told
    # A value that is given alone is no option.
    assert {*options(told)} == {word[2:].replace("-", "_") for word in words if word.startswith("--")}


def test_the_help_of_one_table_has_its_options_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert options(shown(capsys, "train", "--help", "trainer.stops")) == [
        "trainer.stops.mask",
        "trainer.stops.penalise",
        "trainer.stops.penalty",
    ]


def test_an_option_that_is_not_shown_is_accepted_and_a_wrong_one_is_corrected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert parse(TrainConfig, "train", ["--trainer.num-iterations", "3"]).trainer.num_iterations == 3
    assert main(["train", "--trainer.num-iteration", "3"]) == 2
    assert "did you mean '--trainer.num-iterations'?" in capsys.readouterr().err

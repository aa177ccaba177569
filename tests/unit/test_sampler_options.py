"""Options of a sampler: on the command line, in a table of a file, in parentheses; typed by its signature, recorded."""

from pathlib import Path

import pytest

from repl_rl.cli.train import TrainConfig
from repl_rl.errors import ConfigError
from repl_rl.rollout import ReplSampler
from repl_rl.rollout_config import RolloutConfig
from repl_rl.samplers import load_sampler
from repl_rl.samplers.retry_with_feedback_sampler import FeedbackSampler, ReassignRewards
from repl_rl.settings.argument_parser import build_flags_class, dump_toml, iterate_flag_names, parse

MODULE = """
from repl_rl import ReplSampler

class Mine(ReplSampler):
    def __init__(self, depth: int = 1, *, word: str = "", rate: float = 0.5, loud: bool = False, label="") -> None:
        super().__init__()
        self.said = (depth, word, rate, loud, label)

instance = Mine()

def halves(rewards):
    return [reward / 2 for reward in rewards]
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "samplers_with_options.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def sampler_of(*words: str) -> str:
    return parse(TrainConfig, "train", words).sampler


def said(text: str) -> tuple[object, ...]:
    found: tuple[object, ...] = vars(load_sampler(text))["said"]
    return found


def test_a_flag_gives_an_option_of_the_chosen_sampler() -> None:
    sampler = load_sampler(sampler_of("--sampler.max-error-streak", "3", "--sampler.thinking=</think>"))
    assert isinstance(sampler, ReplSampler)
    assert (sampler.max_error_streak, sampler.thinking) == (3, "</think>")


def test_a_sampler_of_the_users_own_is_given_options_by_its_signature() -> None:
    mine = "samplers_with_options:Mine"
    words = ("--sampler.depth", "4", "--sampler.word", "007", "--sampler.rate", "1", "--sampler.loud", "true")
    text = sampler_of("--sampler", mine, *words, "--sampler.label", "7")
    assert said(text) == (4, "007", 1.0, True, 7)
    assert said(sampler_of("--sampler", mine, "--sampler.word", "1e3")) == (1, "1e3", 0.5, False, "")
    assert said(sampler_of("--sampler", mine, "--sampler.word", '"a b"')) == (1, "a b", 0.5, False, "")


def test_an_option_that_is_a_function_is_named() -> None:
    text = sampler_of("--sampler", "feedback", "--sampler.reassign", "samplers_with_options:halves")
    sampler = load_sampler(text)
    assert isinstance(sampler, FeedbackSampler)
    reassign: ReassignRewards = sampler.reassign
    assert reassign([2.0]) == [1.0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--sampler.depth", "3"], "option depth of sampler repl is '3'; its options are max_error_streak, candidates"),
        (["--sampler", "fenced", "--sampler.candidates", "2"], "sampler fenced .*; its options are block, output"),
        (["--sampler", "samplers_with_options:instance", "--sampler.depth", "3"], "it has no options"),
        (["--sampler.max-error-streak", "-1"], "sampler.max_error_streak is -1; give at least 0"),
        (["--sampler", "samplers_with_options:Mine", "--sampler.loud", "3"], "sampler.loud is 3; give true or false"),
        (["--sampler", "samplers_with_options:Mine", "--sampler.depth", "1.5"], "is 1.5; give a whole number"),
        (["--sampler", "samplers_with_options:Mine", "--sampler.depth", "true"], "is True; give a whole number"),
        (["--sampler", "samplers_with_options:Mine", "--sampler.rate", "much"], "is 'much'; give a number"),
        (["--sampler", "feedback", "--sampler.reassign", "no_such:thing"], "reassign is 'no_such:thing'; it cannot be"),
        (["--sampler", "missing", "--sampler.depth", "3"], "sampler is 'missing'; choose one of repl"),
        (["--sampler.max-error-streak"], "give its value after it"),
    ],
)
def test_what_the_sampler_does_not_take_is_refused_with_what_it_takes(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        sampler_of(*words)


def test_options_in_parentheses_are_held_to_the_same_types() -> None:
    with pytest.raises(ConfigError, match="depth of sampler samplers_with_options:Mine is 'x'; give a whole number"):
        load_sampler("samplers_with_options:Mine(depth='x')")
    assert said("samplers_with_options:Mine(rate=1)")[2] == 1.0


def test_a_file_gives_options_as_a_table_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[sampler]\ncandidates = 2\nmax_error_streak = 3\nname = "repl"\n')
    assert sampler_of("--config", str(file)) == "repl(candidates=2, max_error_streak=3)"
    assert (
        sampler_of("--config", str(file), "--sampler.max-error-streak", "5") == "repl(candidates=2, max_error_streak=5)"
    )
    assert sampler_of("--config", str(file), "--sampler", "fenced") == "fenced"
    file.write_text("sampler = 'repl(max_error_streak=3)'\n")
    assert sampler_of("--config", str(file), "--sampler.candidates", "2") == "repl(max_error_streak=3, candidates=2)"


def test_a_table_of_a_file_is_held_to_the_signature_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for text, told in (
        ("[sampler]\ndepth = 3\n", "option depth of sampler repl is 3; its options are"),
        ("[sampler]\nmax_error_streak = [3]\n", "give true, false, a number or a text"),
        ("[sampler.more]\ndepth = 3\n", "option more.depth of sampler repl"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=told):
            sampler_of("--config", str(file))


def test_options_are_recorded_and_read_back_from_the_run(tmp_path: Path) -> None:
    config = parse(TrainConfig, "train", ["--sampler.max-error-streak", "3", "--sampler.thinking", 'it\'s "so"'])
    (tmp_path / "config.toml").write_text(dump_toml(config))
    recorded = RolloutConfig.from_run(tmp_path)
    assert recorded.sampler == config.sampler
    sampler = load_sampler(recorded.sampler)
    assert isinstance(sampler, ReplSampler)
    assert (sampler.max_error_streak, sampler.thinking) == (3, 'it\'s "so"')


def test_free_keys_are_no_settings_of_a_table() -> None:
    assert [name for name in iterate_flag_names(build_flags_class(TrainConfig)) if name.startswith("sampler")] == [
        "sampler"
    ]

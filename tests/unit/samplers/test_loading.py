"""A sampler by name: shipped, a class, an instance with options, or a function that makes one."""

from pathlib import Path

import pytest

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.rollout import ReplSampler
from repl_rl.samplers import load_sampler
from repl_rl.samplers.fenced_code_sampler import FencedCodeSampler
from repl_rl.samplers.fenced_line_sampler import FencedLineSampler
from repl_rl.samplers.retry_with_feedback_sampler import FeedbackSampler

MODULE = """
from repl_rl import FeedbackSampler, ReplSampler
from repl_rl.errors import ConfigError

patient = FeedbackSampler(max_assistant_turns=7)

def made():
    return FeedbackSampler(max_assistant_turns=9)

def makes_nothing():
    return 3

def raises():
    raise RuntimeError("mine")

def refuses():
    raise ConfigError("thing", 1, "correct it")

class Old(ReplSampler):
    api_version = 0

class Optimistic(ReplSampler):
    optimistic = True

class Needy(ReplSampler):
    def __init__(self, depth):
        self.max_depth = depth

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "their_samplers.py").write_text(MODULE)
    (tmp_path / "their_broken_samplers.py").write_text("1/0\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "their_samplers"


def test_shipped_samplers_have_names() -> None:
    assert isinstance(load_sampler("repl"), ReplSampler)
    assert isinstance(load_sampler("fenced"), FencedCodeSampler)
    assert isinstance(load_sampler("fenced_lines"), FencedLineSampler)
    assert isinstance(load_sampler("feedback"), FeedbackSampler)
    assert load_sampler("judge_tool").rehearsals


def test_a_sampler_with_options_is_an_instance_or_a_function(module: str) -> None:
    patient, made = load_sampler(f"{module}:patient"), load_sampler(f"{module}:made")
    assert isinstance(patient, FeedbackSampler)
    assert isinstance(made, FeedbackSampler)
    assert (patient.turns, made.turns) == (7, 9)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Needy", "cannot be made without arguments .*'depth'.* name an instance"),
        ("Old", "api_version of sampler .* is 0; this is version 1"),
        ("number", "give a RolloutSampler, its class, or a function"),
        ("makes_nothing", "it returned a int; return a RolloutSampler"),
        ("refuses", "correct it"),
        ("missing", "cannot be imported"),
        ("", "cannot be imported"),
    ],
)
def test_what_is_no_sampler_is_named_with_its_remedy(module: str, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_sampler(f"{module}:{name}")


def test_an_attribute_that_lost_its_effect_is_warned_of_once(module: str) -> None:
    with pytest.warns(DeprecationWarning, match="`optimistic` of sampler their_samplers:Optimistic") as told:
        load_sampler(f"{module}:Optimistic")
    assert len(told) == 1


def test_what_a_users_module_raises_is_attributed_to_it(module: str) -> None:
    with pytest.raises(UserCodeError, match=r"sampler their_samplers:raises: making it raised RuntimeError\('mine'\)"):
        load_sampler(f"{module}:raises")
    with pytest.raises(UserCodeError, match="importing 'their_broken_samplers' raised ZeroDivisionError"):
        load_sampler("their_broken_samplers:x")

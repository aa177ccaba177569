"""Environments of verifiers: found, played token by token, rewarded as they say, and refused in words."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.integrations.verifiers_sampler import VerifiersSampler, _format_call_arguments
from repl_rl.integrations.verifiers_tasks import load_environment
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.rollout_config import RolloutConfig
from repl_rl.samplers import load_sampler
from repl_rl.samplers.tool_call_parsing import ToolCall
from repl_rl.tasks import Task, load_tasks
from repl_rl.trajectory.trajectory import Stop
from tests.integration.test_bos import beginning, first_id
from tests.support.integrations.environment_packages import DIGITS, GUESS, SHOP, write_package
from tests.support.samplers.marked_text import chat_renderer, play, rollouts_of, written
from tests.support.scripted_rollouts import TASK
from tests.support.tokenizers import merged_tokenizer

pytestmark = [
    pytest.mark.skipif(find_spec("verifiers") is None, reason="the extra verifiers is not installed"),
    pytest.mark.filterwarnings("ignore"),
]
LIMITS = RolloutLimits(max_line_tokens=400, max_lines=6, max_observation_tokens=200)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Packages that are installed, as far as imports go."""
    folder = tmp_path_factory.mktemp("packages")
    with pytest.MonkeyPatch.context() as paths:
        for name, source in (("digit_lines", DIGITS), ("shop_tools", SHOP), ("guess_game", GUESS)):
            paths.syspath_prepend(write_package(folder, name, source))
        yield folder


def broken(here: Path, name: str, source: str) -> str:
    """One more package. Returns its name as tasks."""
    if name not in sys.modules:
        sys.path.insert(0, str(write_package(here, name, source)))
    return f"verifiers:{name}"


def drawn(name: str) -> tuple[VerifiersSampler, tuple[Task, ...]]:
    sampler = load_sampler(RolloutConfig(tasks=f"verifiers:{name}").sampler)
    assert isinstance(sampler, VerifiersSampler)
    return sampler, load_tasks(f"verifiers:{name}", count=3)


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


ASKED = "<|im_start|>assistant\n"


def test_one_turn_is_rewarded_as_the_environment_says_part_by_part(here: Path) -> None:
    sampler, tasks = drawn("digit_lines?num_tasks=5")
    t = play(sampler, f"{user(tasks[0].question)}{ASKED}⟦1234 is it<|im_end|>⟧", tasks[0])
    assert [(part.name, part.value) for part in t.outcomes] == [("brief", 0.1), ("digits", 0.4)]
    assert (t.outcome, t.answer, t.solved, t.stop) == (0.5, "not solved", False, Stop.ANSWERED)
    assert [line.rewards for line in t.lines] == [()], "the reward is the rollout's, and counted once"


def test_without_a_chat_template_a_turn_is_a_line(here: Path) -> None:
    _, tasks = drawn("digit_lines")
    sampler = VerifiersSampler("digit_lines", chat=False, solved_at=1.1)
    t = play(sampler, f"{tasks[1].question}\n⟦12345\n⟧", tasks[1])
    assert (t.outcome, t.answer) == (1.1, "solved")


CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call><|im_end|>'


def said(text: str) -> str:
    return f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n{ASKED}"


def test_tools_are_called_turn_by_turn_with_the_state_that_rewards_read(here: Path) -> None:
    sampler, tasks = drawn("shop_tools")
    prompt = sampler.prompt(tasks[0], chat_renderer(), "chat", "3").text
    assert "shop_price" in prompt
    assert "What an item costs." in prompt
    assert "You sell." in prompt
    first, second = CALL.format("shop_price", '{"item": "pen"}'), CALL.format("shop_price", '{"item": "ink"}')
    t = play(sampler, f"{prompt}⟦{first}⟧{said('3')}⟦{second}⟧{said('8')}⟦It is 11.<|im_end|>⟧", tasks[0])
    assert [(part.name, part.value) for part in t.outcomes] == [("questions", -0.5), ("right", 2.0)]
    assert (t.outcome, t.answer, len(t.lines)) == (1.5, "solved", 3)


def test_a_wrong_call_is_told_and_a_stop_ends_the_conversation(here: Path) -> None:
    sampler, tasks = drawn("shop_tools")
    prompt = sampler.prompt(tasks[0], chat_renderer(), "chat", "3").text
    wrong, unknown = CALL.format("shop_price", '{"item": 3}'), CALL.format("shop_price", '{"item": "ox"}')
    asks = [CALL.format("shop_price", '{"item": "pen"}')] * 2
    told = said("TypeError: shop_price(): item is 3; give a text")
    t = play(
        sampler, f"{prompt}⟦{wrong}⟧{told}⟦{unknown}⟧{said(_KEY_ERROR)}⟦{asks[0]}⟧{said('3')}⟦{asks[1]}⟧", tasks[0]
    )
    assert (t.outcome, t.answer) == (-0.75, "not solved"), "three were asked for, one that is not sold among them"


_KEY_ERROR = "KeyError: 'ox'"


def test_an_env_of_its_own_is_the_user_and_its_tasks_are_endless(here: Path) -> None:
    sampler, tasks = drawn("guess_game")
    assert len({task.question for task in tasks}) == 3
    answer = f"\n{user('{}')}{ASKED}"
    marked = f"{user(tasks[2].question)}{ASKED}⟦10<|im_end|>⟧{answer.format('more')}⟦13<|im_end|>⟧"
    t = play(sampler, f"{marked}{answer.format('less')}⟦12<|im_end|>⟧", tasks[2])
    assert [(part.name, part.value) for part in t.outcomes] == [("found", 1.0), ("turns", pytest.approx(-0.3))]


def test_what_was_said_when_a_budget_ended_the_rollout_is_scored(here: Path) -> None:
    sampler, tasks = drawn("guess_game")
    limits = RolloutLimits(max_line_tokens=400, max_lines=2, max_observation_tokens=200)
    less = f"\n{user('less')}{ASKED}"
    marked = f"{user(tasks[0].question)}{ASKED}⟦11<|im_end|>⟧{less}⟦12<|im_end|>⟧{less}"
    t = play(sampler, marked, tasks[0], limits=limits)
    assert (t.stop, t.answer) == (Stop.MAX_LINES, None)
    assert [(part.name, part.value) for part in t.outcomes] == [("found", 0.0), ("turns", pytest.approx(-0.2))]


def test_its_tasks_fall_into_the_two_parts_by_their_questions(here: Path) -> None:
    train, held = (load_tasks("verifiers:digit_lines", split=split) for split in ("train", "held_out"))
    assert len(train) + len(held) == 64
    assert not {task.question for task in train} & {task.question for task in held}
    assert len(load_tasks("verifiers:guess_game", split="held_out", count=7)) == 7


def test_the_tasks_bring_their_sampler_and_it_plays_no_others(here: Path) -> None:
    assert RolloutConfig(tasks="verifiers:digit_lines").sampler == "verifiers(environment='digit_lines')"
    chosen = RolloutConfig(tasks="verifiers:digit_lines", sampler="verifiers(chat=False)")
    assert chosen.sampler == "verifiers(chat=False, environment='digit_lines')"
    assert RolloutConfig(tasks="verifiers:digit_lines", sampler=chosen.sampler) == chosen
    with pytest.raises(ConfigError, match="it plays --tasks verifiers:NAME alone"):
        RolloutConfig(sampler="verifiers")
    with pytest.raises(ConfigError, match="'fenced'; verifiers alone plays --tasks verifiers:NAME"):
        RolloutConfig(tasks="verifiers:digit_lines", sampler="fenced")


RAISES_ON_IMPORT = "raise ValueError('no luck')\n"
NEEDS_A_KEY = "import os\n\nos.environ['SHOP_API_KEY']\n"
NEEDS_A_PACKAGE = "import a_package_that_nobody_has\n"
NO_TASKSET = "__all__ = []\n"
JUDGED = """\
import verifiers.v1 as vf


class JudgedConfig(vf.TaskConfig):
    judge: vf.JudgeConfig = vf.JudgeConfig(api_key_var="JUDGE_API_KEY")


class JudgedTask(vf.Task[vf.TaskData, vf.State, JudgedConfig]):
    pass


class JudgedTaskset(vf.Taskset[JudgedTask, vf.TasksetConfig]):
    def load(self):
        yield JudgedTask(vf.TaskData(prompt="How are you?"))


__all__ = ["JudgedTaskset"]
"""
SEVERAL = GUESS.replace("    player: vf", "    coach: vf.AgentConfig = vf.AgentConfig()\n    player: vf")
BOXED = SHOP.replace("    @classmethod", "    NEEDS_CONTAINER = True\n\n    @classmethod", 1)
SILENT = GUESS.replace('prompt=f"Game {n}: I think of a number from 1 to 99. Which?"', "prompt=None")


@pytest.mark.parametrize(
    ("name", "source", "kind", "told"),
    [
        ("raises_on_import", RAISES_ON_IMPORT, UserCodeError, "importing it raised ValueError: no luck"),
        ("needs_a_key", NEEDS_A_KEY, ConfigError, "environment variable SHOP_API_KEY is None; .* needs it; set it"),
        ("needs_a_package", NEEDS_A_PACKAGE, ConfigError, "module a_package_that_nobody_has is None; .* install it"),
        ("no_taskset", NO_TASKSET, ConfigError, "verifiers refuses it: .* exports no Taskset"),
        ("judged_once", JUDGED, ConfigError, "environment variable JUDGE_API_KEY is None; a judge of the"),
        ("several_seats", SEVERAL, ConfigError, "agents of .* is 'coach, player'; a policy can be one agent"),
        ("boxed_shop", BOXED, ConfigError, "one with a container"),
        ("silent_game", SILENT, ConfigError, "one without a prompt"),
    ],
)
def test_what_cannot_be_loaded_says_why_before_anything_is_opened(
    here: Path, name: str, source: str, kind: type[Exception], told: str
) -> None:
    with pytest.raises(kind, match=told):
        load_tasks(broken(here, name, source), count=2)


@pytest.mark.parametrize(
    ("tasks", "told"),
    [
        ("verifiers:nobody_has_this", "is 'nobody_has_this'; there is none of that name here"),
        ("verifiers:", "is ''; name one that is installed"),
        ("verifiers:a.b", "is 'a.b'; name one that is installed"),
        ("verifiers:digit_lines?colour=red", "verifiers refuses it: .*colour"),
        ("verifiers:digit_lines?num_tasks=many", "verifiers refuses it: .*num_tasks"),
    ],
)
def test_bad_names_are_one_line_and_exit_code_2(
    here: Path, tasks: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=told):
        load_tasks(tasks)
    assert main(["rollout", "--tasks", tasks, "--engine", "transformers"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_arguments_that_json_lacks_are_recorded_as_text() -> None:
    assert _format_call_arguments(ToolCall("f", kwargs={"items": {3}, "n": 1})) == '{"items": "{3}", "n": 1}'


def test_tools_without_a_chat_are_refused(here: Path) -> None:
    with pytest.raises(ConfigError, match="has tools, which are called in a chat"):
        VerifiersSampler("shop_tools", chat=False).check_policy(chat_renderer(), "bare")


RAISING = DIGITS.replace("        said = trace.last_reply\n", "        raise RuntimeError('the scale broke')\n")
ASKS_ITS_RUNTIME = DIGITS.replace("digits(self, trace: vf.Trace)", "digits(self, trace: vf.Trace, runtime)").replace(
    "        said = trace.last_reply\n", "        said = (await runtime.run(['ls'], {})).stdout\n"
)


@pytest.mark.parametrize(
    ("name", "source", "told"),
    [
        ("raising_lines", RAISING, "the scale broke"),
        ("runtime_lines", ASKS_ITS_RUNTIME, "asks its runtime for 'run'; there is none here"),
    ],
)
def test_an_environment_that_raises_costs_its_rollout_and_says_so(
    here: Path, name: str, source: str, told: str
) -> None:
    broken(here, name, source)
    sampler, renderer = VerifiersSampler(name), chat_renderer()
    (task, *_) = load_tasks(f"verifiers:{name}")
    rollouts = rollouts_of(sampler, [written(renderer, "1<|im_end|>")], renderer)
    with pytest.raises(UserCodeError, match=told):
        asyncio.run(rollouts.collect([task]))


def test_a_task_of_another_source_is_refused(here: Path) -> None:
    with pytest.raises(ConfigError, match="plays the environment 'digit_lines' of verifiers alone"):
        VerifiersSampler("digit_lines").make(TASK)


@pytest.mark.heavy
def test_an_environment_installs_without_a_network_and_is_found_by_its_name(tmp_path: Path) -> None:
    project = write_package(tmp_path, "offline_lines", DIGITS)
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(target), str(project)], check=True, timeout=240)
    with pytest.MonkeyPatch.context() as paths:
        paths.syspath_prepend(target)
        assert len(load_tasks("verifiers:offline_lines")) == 64
        assert str(target) in str(
            load_environment("offline_lines").verifiers_v1.import_taskset("offline_lines").__file__
        )


def test_a_plain_prompt_begins_with_the_tokenizers_first_token(here: Path) -> None:
    tasks = load_tasks("verifiers:digit_lines", count=3)
    sampler = VerifiersSampler("digit_lines", chat=False, solved_at=1.1)
    prompt = sampler.prompt(tasks[1], Renderer(beginning(merged_tokenizer())), "base", "3")
    assert prompt.token_ids[0] == first_id()

"""The conformance suite: shipped samplers keep every promise, and each way to break one is told by its name."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.integrations.gym_environment_sampler import EnvironmentSampler
from repl_rl.rollout import ReplSampler, RolloutSampler
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.samplers.chat_tool_sampler import ChatToolSampler, JudgeToolSampler
from repl_rl.samplers.conformance_checks import CHECKS, SamplerFixture, run_checks
from repl_rl.samplers.fenced_code_sampler import FencedCodeSampler
from repl_rl.samplers.fenced_line_sampler import FencedLineSampler
from repl_rl.samplers.inline_call_sampler import InlineCallSampler
from repl_rl.samplers.retry_with_feedback_sampler import FeedbackSampler
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Observed, Prompt
from tests.support.samplers.marked_text import chat_renderer
from tests.unit.integrations.test_environment import Doors


def weather(place: str) -> str:
    """The weather.

    Args:
        place: City and state.
    """
    return "sunny"


SHIPPED = [
    ReplSampler(),
    ReplSampler(candidates=2),
    FencedCodeSampler(),
    FencedLineSampler(),
    InlineCallSampler([weather]),
    ChatToolSampler([weather]),
    FeedbackSampler(),
    JudgeToolSampler(),
    EnvironmentSampler(Doors),
    EnvironmentSampler(Doors, chat=False),
]


@pytest.mark.parametrize("sampler", SHIPPED, ids=lambda sampler: type(sampler).__name__)
def test_shipped_samplers_keep_every_promise(sampler: RolloutSampler) -> None:
    rows = run_checks(sampler)
    assert [row for row in rows if not row.passed] == []
    assert len(rows) == len(CHECKS)


class Repl(ReplSampler):
    """What the broken ones below are made from."""


class Waits(Repl):
    async def rollout(self, episode: Episode) -> None:
        await asyncio.Event().wait()


class Swallows(Repl):
    async def rollout(self, episode: Episode) -> None:
        try:
            await super().rollout(episode)
        except asyncio.CancelledError:
            await asyncio.Event().wait()


class SwallowsEverything(Repl):
    async def rollout(self, episode: Episode) -> None:
        try:
            await super().rollout(episode)
        except Exception:
            episode.finish()


class NotANumber(Repl):
    async def rollout(self, episode: Episode) -> None:
        await episode.sample()
        episode.reward(float("nan"), name="bonus")


class LosesAToken(Repl):
    async def rollout(self, episode: Episode) -> None:
        await episode.sample()
        episode._record._items.pop()
        episode._record._line_indices.pop()


class ForgesAMask(Repl):
    async def rollout(self, episode: Episode) -> None:
        line = await episode.sample()
        episode._record._items[-1] = Observed(line.text, line.token_ids)
        episode._record._line_indices.pop()


class Remembers(Repl):
    def __init__(self) -> None:
        self.count = 0

    async def rollout(self, episode: Episode) -> None:
        async for line in episode.lines():
            self.count += 1
            episode.reward(self.count, name="count")
            await episode.push(line)


class Tells(Repl):
    async def rollout(self, episode: Episode) -> None:
        async for _ in episode.lines():
            episode.observe(f"the answer is {episode.task.answer}\n")


class GoesOn(Repl):
    async def rollout(self, episode: Episode) -> None:
        for _ in range(100):
            await episode.push(await episode.sample())


class ManyPrompts(Repl):
    count = 0

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        self.count += 1
        return Prompt(str(self.count), renderer.encode(str(self.count)))


@pytest.mark.parametrize(
    ("sampler", "promise", "told"),
    [
        (Waits, "every rollout ends", "were ended by the wall clock"),
        (Swallows, "cancellation passes", "let CancelledError pass"),
        (SwallowsEverything, "errors of the engine pass", "catch fewer exceptions"),
        (SwallowsEverything, "errors of the console pass", "catch fewer exceptions"),
        (NotANumber, "every rollout ends", "NotANumber.rollout: episode.reward(name='bonus') is nan; give a finite"),
        (LosesAToken, "every rollout ends", "the engine's ids differ from the record"),
        (ForgesAMask, "every rollout ends", "text before the first line belongs to the prompt"),
        (Remembers, "rollouts share no state", "keep state in local variables"),
        (Tells, "the reference answer is never shown", "shows the reference answer"),
        (GoesOn, "every rollout ends", "check episode.ended before you push"),
        (ManyPrompts, "the prompt is the same for all rollouts of a task", "3 different prompts"),
    ],
)
def test_each_broken_promise_is_told(sampler: Callable[[], RolloutSampler], promise: str, told: str) -> None:
    (row,) = run_checks(sampler(), only=[promise.replace(" ", "_")])
    assert not row.passed
    assert told in row.detail


def test_a_sampler_that_blocks_its_thread_is_told_where_and_ends_the_check() -> None:
    release = threading.Event()

    class Blocks(Repl):
        async def rollout(self, episode: Episode) -> None:
            release.wait()

    rows = run_checks(Blocks(), timeout_s=1.5)
    release.set()
    assert len(rows) == 2
    assert not rows[-1].passed
    assert "blocks its thread" in rows[-1].detail
    assert "test_conformance.py" in rows[-1].detail


@pytest.mark.heavy
def test_a_sampler_that_keeps_the_thread_for_a_while_is_told_how_long() -> None:
    class Dawdles(Repl):
        async def rollout(self, episode: Episode) -> None:
            threading.Event().wait(1.2)  # nobody sets it
            await super().rollout(episode)

    (row,) = run_checks(Dawdles(), only=["the_thread_is_never_blocked"])
    assert not row.passed
    assert "other rollouts waited" in row.detail


def test_a_sampler_can_be_checked_with_the_chat_format_of_another_model() -> None:
    rows = run_checks(FeedbackSampler(), chat_renderer("llama3_2"))
    assert [row for row in rows if not row.passed] == []


def test_no_script_of_the_suite_runs_out() -> None:
    bench = SamplerFixture(ReplSampler(), chat_renderer(), "bare")
    assert min(map(len, bench.scripts)) > 12 * 256


def test_the_verb_prints_a_table_and_its_exit_code_says_whether_all_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checked_samplers.py").write_text(
        "from repl_rl import Episode, ReplSampler, RolloutSampler\n\n\n"
        "class Bad(RolloutSampler):\n    async def rollout(self, episode: Episode) -> None:\n"
        "        await episode.sample()\n        episode.observe(episode.task.answer)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["sampler", "check", "repl"]) == 0
    assert main(["sampler", "check", "checked_samplers:Bad"]) == 1
    assert "NO" in capsys.readouterr().out
    assert main(["sampler", "check"]) == 2
    assert main(["sampler", "nope"]) == 2
    assert main(["sampler", "check", "checked_samplers:Missing"]) == 2
    assert "Missing" in capsys.readouterr().err

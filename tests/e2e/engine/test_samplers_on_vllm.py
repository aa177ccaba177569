"""Samplers on real vLLM: what they record are log probabilities of exactly these ids after exactly this context."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from repl_rl.credit.credited_trajectory import add_child_rows
from repl_rl.integrations.gym_environment_sampler import EnvironmentSampler
from repl_rl.rollout import Rollouts, RolloutSampler, RolloutSettings
from repl_rl.rollout.episode import Choice, Episode
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.samplers.chat_tool_sampler import ChatToolSampler, JudgeToolSampler
from repl_rl.samplers.fenced_code_sampler import FencedCodeSampler
from repl_rl.samplers.inline_call_sampler import CallConvention, InlineCallSampler
from repl_rl.samplers.retry_with_feedback_sampler import Exchange, Feedback, FeedbackSampler
from repl_rl.samplers.tool_call_parsing import ToolCall
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Line, Sampled, Trajectory
from tests.support.engine.tiny_models import STOPS, VOCABULARY, Host, torch_logprobs

LIMITS = RolloutLimits(max_lines=6, max_line_tokens=24, max_observation_tokens=16)
TEMPLATE = (
    "{% if tools %}t{% endif %}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}a:"
)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    """A tokenizer that has no more ids than the policy. Its first id ends turns."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    tokenizer.train_from_iterator(["a call, a result and feedback: wrong, try again"] * 9, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", name_or_path="tiny")
    assert len(wrapped) <= VOCABULARY
    wrapped.chat_template = TEMPLATE
    return Renderer(wrapped, "carry")


def play(host: Host, sampler: RolloutSampler, renderer: Renderer) -> list[Trajectory]:
    rollouts = Rollouts(host.engine, InProcessSandbox(), renderer, sampler, LIMITS, RolloutSettings("bare"))
    return host.run(rollouts.collect([Task(str(i), f"q{i}", "x") for i in range(8)]))


def largest_gap(t: Trajectory, folder: Path) -> float:
    """Nats between the recorded log probabilities and those of a plain forward over the whole record."""
    ids = (*t.prompt.token_ids, *t.completion_ids)
    expected: list[float] = torch_logprobs(folder, ids)[-len(t.completion_ids) :].tolist()
    pairs = zip(t.logprobs_T(), expected, t.loss_mask, strict=True)
    return max(abs(ours - theirs) for ours, theirs, sampled in pairs if sampled)


def called(x: object) -> str:
    """Answer.

    Args:
        x: Anything.
    """
    return "a result"


def told(exchange: Exchange) -> Feedback:
    return Feedback("wrong, try again", reward=0.5)


class Echo:
    """An environment that never ends."""

    async def reset(self) -> str:
        return "go"

    async def step(self, action: object) -> tuple[str, float, bool, bool, dict[str, object]]:
        return "a result", 0.1, False, False, {}


@pytest.mark.parametrize(
    "sampler",
    [
        InlineCallSampler([called], convention=CallConvention(call=r"([a-z])", answer="")),
        FencedCodeSampler(block=r"([a-z])"),
    ],
    ids=["calls", "blocks"],
)
def test_calls_are_seen_while_vllm_streams_and_answered_in_place(
    vllm_host: Host, renderer: Renderer, policy_folder: Path, sampler: RolloutSampler
) -> None:
    found = play(vllm_host, sampler, renderer)
    assert sum(len(t.lines) > 1 for t in found) >= 4
    assert max(largest_gap(t, policy_folder) for t in found) < 1e-3


def nth(at: int, lines: Sequence[Line]) -> Choice:
    return Choice(at)


class ChoosesInTurn(RolloutSampler):
    """Three texts at each place; goes on from the first, the second, the third, the first, ..."""

    async def rollout(self, episode: Episode) -> None:
        turn = 0
        while not episode.ended:
            await episode.choose(3, partial(nth, turn % 3), until=r"[a-z]")
            turn += 1
            if not episode.ended:
                episode.observe("a result")


@pytest.mark.parametrize("host", ["vllm_host", "transformers_host"])
def test_lines_chosen_among_several_and_their_alternatives_have_their_own_log_probabilities(
    host: str, request: pytest.FixtureRequest, renderer: Renderer, policy_folder: Path
) -> None:
    found = play(request.getfixturevalue(host), ChoosesInTurn(), renderer)
    assert sum(len(t.lines) > 3 for t in found) >= 4
    assert max(largest_gap(t, policy_folder) for t in found) < 1e-3
    rows, _ = add_child_rows([taught(t) for t in found], [(0.0,) * len(t.lines) for t in found])
    assert len(rows) == len(found) + 2 * sum(len(t.lines) for t in found)
    assert max(largest_gap(row, policy_folder) for row in rows[len(found) :][::5]) < 1e-3


def taught(t: Trajectory) -> Trajectory:
    """The same with alternatives that are trained, so that each is a row."""

    def line(each: Line) -> Line:
        return replace(each, alternatives=tuple(replace(other, advantage=1.0) for other in each.alternatives))

    segments = (Sampled(tuple(map(line, s.lines))) if isinstance(s, Sampled) else s for s in t.segments)
    return replace(t, segments=tuple(segments))


@pytest.mark.parametrize(
    "sampler",
    [
        FeedbackSampler(told, max_assistant_turns=4),
        ChatToolSampler([called], parse=lambda text: [ToolCall("called", (text,)), ToolCall("called")]),
        JudgeToolSampler([called], parse=lambda text: [ToolCall("check_answer", (), {"answer": text})]),
        EnvironmentSampler(lambda task: Echo()),
    ],
    ids=["feedback", "tools", "judge", "environment"],
)
def test_turns_and_replies_on_vllm(
    vllm_host: Host, renderer: Renderer, policy_folder: Path, sampler: RolloutSampler
) -> None:
    often = Renderer(renderer.tokenizer, "carry")
    often.audit = replace(often.audit, eos_ids=STOPS)  # a random policy would seldom write the one end token
    found = play(vllm_host, sampler, often)
    assert sum(len(t.lines) > 1 for t in found) >= 2
    assert max(largest_gap(t, policy_folder) for t in found) < 1e-3

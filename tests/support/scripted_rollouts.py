"""Small worlds for rollouts: a scripted policy, an in-memory console, a tokenizer made here."""

from collections.abc import Sequence
from dataclasses import replace

from repl_rl.engine import ScriptedEngine
from repl_rl.rollout import ReplSampler, Rollouts, RolloutSampler, RolloutSettings
from repl_rl.rollout.retry import FaultRetries
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.tasks import Task
from tests.support.tokenizers import merged_tokenizer

RENDERER = Renderer(merged_tokenizer())
TASK = Task("t1", "What is 6 * 7?", "42")


def world(
    lines: Sequence[str],
    sampler: RolloutSampler | None = None,
    limits: RolloutLimits | None = None,
    renderer: Renderer = RENDERER,
    concurrency: int = 64,
) -> Rollouts:
    """Rollouts of a policy that writes `lines`, whatever it is shown; a console's prompt comes before each of them."""
    if renderer.samples_space and isinstance(sampler or ReplSampler(), ReplSampler):
        lines = [line if line.startswith("\n") else f" {line}" for line in lines]
    return Rollouts(
        replace(ScriptedEngine.from_text(lines, renderer.encode_as_sampled), forbidden_ids=renderer.forbidden_ids),
        InProcessSandbox(),
        renderer,
        sampler or ReplSampler(),
        limits or RolloutLimits(max_line_tokens=200),
        RolloutSettings("bare", concurrency=concurrency),
        (FaultRetries(),),
    )

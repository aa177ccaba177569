"""Rollouts written down as text: what the policy writes stands in ⟦brackets⟧, everything else is spliced in.

`play` has a scripted policy write the bracketed pieces, and checks the record against the text token by token.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files

from repl_rl.engine import ScriptedEngine
from repl_rl.rollout import Rollouts, RolloutSampler
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Observed, Trajectory
from tests.support.scripted_rollouts import TASK, world
from tests.support.tokenizers import merged_tokenizer

LIMITS = RolloutLimits(max_line_tokens=2_000, max_lines=20, max_observation_tokens=1_000)
_PIECE = re.compile(r"⟦(.*?)⟧", re.DOTALL)


@cache
def chat_renderer(template: str = "qwen3") -> Renderer:
    """Our small tokenizer with the chat template of a model family, as TRL ships it."""
    tokenizer = merged_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|eot_id|>", "<|start_header_id|>"]})
    tokenizer.chat_template = (files("trl") / "chat_templates" / f"{template}.jinja").read_text()
    if template.startswith("llama"):
        tokenizer.eos_token = "<|eot_id|>"
    return Renderer(tokenizer)


def written(renderer: Renderer, text: str) -> list[int]:
    """Ids of what a policy writes: it may write control tokens."""
    ids: list[int] = renderer.tokenizer.encode(text, add_special_tokens=False)
    return ids


def rollouts_of(
    sampler: RolloutSampler, scripts: Sequence[Sequence[int]], renderer: Renderer, limits: RolloutLimits = LIMITS
) -> Rollouts:
    """Rollouts in which a scripted policy writes one of `scripts`."""
    return replace(world([], sampler, limits, renderer), engine=ScriptedEngine([list(ids) for ids in scripts] or [[0]]))


def play(
    sampler: RolloutSampler,
    marked: str,
    task: Task = TASK,
    *,
    renderer: Renderer | None = None,
    limits: RolloutLimits = LIMITS,
) -> Trajectory:
    """Play what stands in brackets, and hold the record to the whole of `marked`."""
    renderer = renderer or chat_renderer()
    pieces = _PIECE.split(marked)  # shown, written, shown, written, ..., shown
    scripts = [written(renderer, text) for text in pieces[1::2]]
    rollouts = rollouts_of(sampler, [[i for ids in scripts for i in ids]], renderer, limits)
    trajectory = asyncio.run(rollouts.collect([task]))[0]
    check(trajectory, pieces, scripts, renderer)
    return trajectory


def check(trajectory: Trajectory, pieces: Sequence[str], scripts: Sequence[Sequence[int]], renderer: Renderer) -> None:
    """The prompt, every sampled id with its log probability and mask, every observed text with its mask."""
    shown = [renderer.decode(s.token_ids) for s in trajectory.segments if isinstance(s, Observed)]
    assert trajectory.prompt.text == pieces[0]
    assert [text for text in shown if text] == [text for text in pieces[2::2] if text]
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    observed = iter([s.token_ids for s in trajectory.segments if isinstance(s, Observed)])
    for number, script in enumerate(scripts):
        ids += script
        mask += [True] * len(script)
        logprobs += [-0.5] * len(script)
        between = next(observed, ()) if pieces[2 * number + 2] or number + 1 < len(scripts) else ()
        ids += between
        mask += [False] * len(between)
        logprobs += [0.0] * len(between)
    assert list(trajectory.completion_ids) == ids
    assert list(trajectory.loss_mask) == mask
    assert list(trajectory.logprobs_T()) == logprobs

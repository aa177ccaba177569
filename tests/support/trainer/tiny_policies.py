"""Small random policies and a rollout source that samples from one, for the trainer's tests."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from repl_rl.models.transform_logits import forbid_ids
from repl_rl.trajectory.trajectory import (
    Execution,
    Failure,
    FailureKind,
    Line,
    LineEnd,
    LineStatus,
    Observed,
    Prompt,
    Sampled,
    Stop,
    Trajectory,
)

VOCAB = 64
PAD, EOS, NEWLINE = 0, 1, 2


def tiny_model(seed: int = 0, vocab: int = VOCAB, hidden: int = 32, layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        intermediate_size=3 * hidden,
        tie_word_embeddings=False,
        initializer_range=0.2,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def tiny_tokenizer(vocab: int = VOCAB) -> PreTrainedTokenizerFast:
    words = {"<pad>": PAD, "<eos>": EOS, "\n": NEWLINE} | {f"w{i}": i for i in range(3, vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def prompt_of(task_id: str) -> Prompt:
    rng = random.Random(task_id)
    return Prompt(task_id, tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(2, 5))))


Skeleton = list[tuple[tuple[int, ...], tuple[int, ...] | None]]
"""Sampled ids of a line and the ids observed after it; None: nothing follows, the line ends the rollout."""


class SampledSource:
    """Plays rollouts from its own copy of a policy against a console made of dice.

    A line whose first id is in the upper third of the vocabulary is an error; the outcome is the share of even ids.
    `deaf` makes it ignore new weights: the fault that the trainer must notice. `faulty` rollouts fail on our side.
    It samples none of `forbidden_ids`, and observes them like any others.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        seed: int = 0,
        deaf: bool = False,
        faulty: frozenset[int] = frozenset(),
        forbidden_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.model = model
        self.forbidden_ids = forbidden_ids
        forbid_ids(model, forbidden_ids)
        self.seed = seed
        self.deaf = deaf
        self.faulty = faulty
        self.loads: list[int] = []
        self.steps: list[list[Trajectory]] = []

    def load_weights(self, folder: Path, policy_step: int) -> None:
        self.loads.append(policy_step)
        if not self.deaf:
            self.model.load_state_dict(load_file(folder / "model.safetensors"))

    def collect(self, task_ids: Sequence[str], policy_step: int) -> list[Trajectory]:
        rng = random.Random(f"{self.seed} {policy_step}")
        self.steps.append([self.rollout(task, i, policy_step, rng) for i, task in enumerate(task_ids)])
        return self.steps[-1]

    def rollout(self, task_id: str, number: int, policy_step: int, rng: random.Random) -> Trajectory:
        prompt = prompt_of(task_id)
        skeleton = draw(rng, self.forbidden_ids)
        logprobs = logprobs_of(self.model, prompt, skeleton)
        return trajectory_of(prompt, skeleton, logprobs, number, policy_step, fault=number in self.faulty)


def at_step(t: Trajectory, policy_step: int) -> Trajectory:
    """The same, as the policy of that step wrote it."""
    segments = tuple(
        Sampled(tuple(replace(line, policy_step=policy_step) for line in s.lines)) if isinstance(s, Sampled) else s
        for s in t.segments
    )
    return replace(t, policy_step=policy_step, segments=segments)


class ReplayedSource:
    """Gives recorded trajectories again, step by step; a step takes `optimizer_steps`."""

    forbidden_ids = frozenset[int]()

    def __init__(self, steps: Sequence[Sequence[Trajectory]], optimizer_steps: int = 1) -> None:
        self.steps = steps
        self.optimizer_steps = optimizer_steps

    def load_weights(self, folder: Path, policy_step: int) -> None:
        pass

    def collect(self, task_ids: Sequence[str], policy_step: int) -> Sequence[Trajectory]:
        return self.steps[policy_step // self.optimizer_steps]


def draw(rng: random.Random, forbidden_ids: frozenset[int] = frozenset()) -> Skeleton:
    """One to three lines with observations; a third of the rollouts end with the end token."""
    skeleton: Skeleton = []
    allowed = sorted(set(range(3, VOCAB)) - forbidden_ids)
    for _ in range(rng.randint(1, 3)):
        line = (*(rng.choice(allowed) for _ in range(rng.randint(1, 5))), NEWLINE)
        skeleton.append((line, tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(0, 6)))))
    if rng.random() < 1 / 3:
        skeleton.append(((rng.choice(allowed), EOS), None))
    return skeleton


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, prompt: Prompt, skeleton: Skeleton) -> list[float]:
    """Log probabilities (nats) of every completion token."""
    ids = [*prompt.token_ids, *(i for sampled, observed in skeleton for i in (*sampled, *(observed or ())))]
    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    values: list[float] = logprobs[torch.arange(len(ids) - 1), ids[1:]].tolist()
    return values[len(prompt.token_ids) - 1 :]


def trajectory_of(
    prompt: Prompt,
    skeleton: Skeleton,
    logprobs_T: Sequence[float],
    number: int = 0,
    policy_step: int = 0,
    fault: bool = False,
) -> Trajectory:
    segments: list[Sampled | Observed] = []
    at = 0
    for sampled, observed in skeleton:
        status = LineStatus.EXCEPTION if sampled[0] > 2 * VOCAB // 3 else LineStatus.OK
        logprobs = tuple(min(p, 0.0) for p in logprobs_T[at : at + len(sampled)])
        end = LineEnd.NEWLINE if observed is not None else LineEnd.EOS
        line = Line(sampled, logprobs, "x\n", end, Execution(status, 0.0), policy_step=policy_step)
        segments.append(Sampled((line,)))
        if observed is not None:
            segments.append(Observed("y" if observed else "", observed))
        at += len(sampled) + len(observed or ())
    tokens = [i for sampled, _ in skeleton for i in sampled]
    stop = Stop.MAX_LINES if skeleton[-1][1] is not None else Stop.EOS
    return Trajectory(
        id=f"{prompt.text}/{number}",
        task_id=prompt.text,
        prompt=prompt,
        segments=tuple(segments),
        stop=Stop.FAULT if fault else stop,
        policy_step=policy_step,
        seed=number,
        wall_s=0.0,
        outcome=None if fault else sum(i % 2 == 0 for i in tokens) / len(tokens),
        failure=Failure(FailureKind.SANDBOX_FAULT, "the console is gone") if fault else None,
    )

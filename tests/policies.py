"""Small random policies and a rollout source that samples from one, for the trainer's tests."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from repl_rl.trajectory import (
    Execution,
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


class SampledSource:
    """Plays rollouts from its own copy of a policy against a console made of dice.

    A token over 2/3 of the vocabulary is an error when it ends a line; the outcome is the share of even ids.
    `deaf` makes it ignore new weights: the fault that the trainer must notice.
    """

    def __init__(self, model: PreTrainedModel, seed: int = 0, deaf: bool = False) -> None:
        self.model = model
        self.seed = seed
        self.deaf = deaf
        self.loads: list[int] = []

    def load_weights(self, folder: Path, policy_step: int) -> None:
        self.loads.append(policy_step)
        if not self.deaf:
            self.model.load_state_dict(load_file(folder / "model.safetensors"))

    def collect(self, task_ids: Sequence[str], policy_step: int) -> list[Trajectory]:
        rng = random.Random(f"{self.seed} {policy_step}")
        return [self.rollout(task, i, policy_step, rng) for i, task in enumerate(task_ids)]

    @torch.no_grad()
    def rollout(self, task_id: str, number: int, policy_step: int, rng: random.Random) -> Trajectory:
        prompt = prompt_of(task_id)
        skeleton: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for _ in range(rng.randint(1, 3)):
            line = (*(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 5))), NEWLINE)
            skeleton.append((line, tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(0, 6)))))
        ids = [*prompt.token_ids, *(i for pair in skeleton for part in pair for i in part)]
        logits = self.model(torch.tensor([ids])).logits[0]
        logprobs = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].tolist()
        return trajectory_of(task_id, number, policy_step, prompt, skeleton, logprobs[len(prompt.token_ids) - 1 :])


def trajectory_of(
    task_id: str,
    number: int,
    policy_step: int,
    prompt: Prompt,
    skeleton: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    logprobs_T: Sequence[float],
) -> Trajectory:
    segments: list[Sampled | Observed] = []
    at = 0
    for sampled, observed in skeleton:
        status = LineStatus.EXCEPTION if sampled[0] > 2 * VOCAB // 3 else LineStatus.OK
        logprobs = tuple(min(p, 0.0) for p in logprobs_T[at : at + len(sampled)])
        line = Line(sampled, logprobs, "x\n", LineEnd.NEWLINE, Execution(status, 0.0))
        segments += [Sampled((line,)), Observed("y", observed)]
        at += len(sampled) + len(observed)
    tokens = [i for sampled, _ in skeleton for i in sampled]
    return Trajectory(
        id=f"{task_id}/{number}",
        task_id=task_id,
        prompt=prompt,
        segments=tuple(segments),
        stop=Stop.MAX_LINES,
        policy_step=policy_step,
        seed=number,
        wall_s=0.0,
        outcome=sum(i % 2 == 0 for i in tokens) / len(tokens),
    )

"""Supervised fine-tuning on transcripts: the loss is on the policy's own tokens alone."""

import math
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from repl_rl.coldstart.transcripts import Transcript, read_transcripts
from repl_rl.coldstart.vocabulary import CONTEXT_TOKENS
from repl_rl.errors import ConfigError
from repl_rl.renderer import Renderer

_IGNORED = -100
_TOKENIZER_FILES = ("*token*", "vocab*", "merges*", "chat_template*")


@dataclass(frozen=True, slots=True)
class SftConfig:
    """How long and how fast to learn."""

    steps: int
    """Optimizer steps (>= 1)."""
    learning_rate: float = 3e-3
    """Peak of a cosine schedule to a tenth of it, after `warmup_steps` (> 0)."""
    warmup_steps: int = 30
    """Optimizer steps (>= 0)."""
    batch_size: int = 32
    """Transcripts a step (>= 1)."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, floor in (("steps", 1), ("batch_size", 1), ("warmup_steps", 0)):
            if getattr(self, name) < floor:
                raise ConfigError(name, getattr(self, name), f"give at least {floor}")
        if not self.learning_rate > 0:
            raise ConfigError("learning_rate", self.learning_rate, "give a positive number")


@dataclass(frozen=True, slots=True)
class Example:
    """A transcript in ids, and which of them the policy learns to write. Both have the shape (T,)."""

    token_ids: tuple[int, ...]
    sampled: tuple[bool, ...]


def example(transcript: Transcript, renderer: Renderer, template: str = "bare") -> Example:
    """Encode as a rollout does: the prompt once, each line alone, each observation alone."""
    ids = list(renderer.prompt(transcript.question, template).token_ids)
    sampled = [False] * len(ids)
    for n, turn in enumerate(transcript.turns):
        for text, own in ((turn.line, n >= transcript.given), (turn.observed, False)):
            encoded = renderer.encode(text)
            ids += encoded
            sampled += [own] * len(encoded)
    if transcript.gives_up:
        ids.append(min(renderer.eos_ids))
        sampled.append(True)
    return Example(tuple(ids), tuple(sampled))


def new_policy(renderer: Renderer, seed: int) -> PreTrainedModel:
    """A Qwen3-shaped policy with random weights, 0.89 M parameters. Embeddings are untied, see docs/design.md."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(renderer.tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=min(renderer.eos_ids),
        pad_token_id=renderer.pad_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def sft(
    base: Path,
    transcripts: Path,
    out: Path,
    config: SftConfig,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Fine-tune the policy in `base` and save it, with its tokenizer, in `out`. Returns the last loss (nats a token).

    A `base` that has a tokenizer but no `config.json` stands for a new policy with random weights.

    Raises:
        ConfigError: no tokenizer, no transcripts, or a line that is not one.
    """
    renderer = Renderer.from_folder(base)
    examples = [example(transcript, renderer) for transcript in read_transcripts(transcripts)]
    if not examples:
        raise ConfigError("transcripts file", str(transcripts), "it is empty; write at least one transcript")
    fresh = not (base / "config.json").exists()
    model = new_policy(renderer, config.seed) if fresh else AutoModelForCausalLM.from_pretrained(base)
    loss = _fit(model, examples, renderer.pad_id, config, progress)
    model.save_pretrained(out)
    for pattern in _TOKENIZER_FILES:
        for file in base.glob(pattern):
            shutil.copy(file, out)
    return loss


def _fit(
    model: PreTrainedModel,
    examples: Sequence[Example],
    pad_id: int,
    config: SftConfig,
    progress: Callable[[int, float], None],
) -> float:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, config))
    batches = _batches(examples, config)
    loss = torch.tensor(math.nan)
    for step in range(1, config.steps + 1):
        ids_BT, labels_BT = _tensors(next(batches), pad_id)
        logits = model(input_ids=ids_BT[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=_IGNORED)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress(step, loss.item())
    return loss.item()


def _rate(step: int, config: SftConfig) -> float:
    """Share of the peak learning rate at a step counted from 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def _batches(examples: Sequence[Example], config: SftConfig) -> Iterator[Sequence[Example]]:
    """Endless shuffled batches. They are not sorted by length: that sorts families too, and learning slows down."""
    rng = random.Random(config.seed)
    while True:
        shuffled = rng.sample(examples, len(examples))
        for start in range(0, len(shuffled), config.batch_size):
            yield shuffled[start : start + config.batch_size]


def _tensors(batch: Sequence[Example], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, both (B, T), padded on the right. A label is the id where the policy wrote it, else ignored."""
    width = max(len(e.token_ids) for e in batch)
    ids_BT = torch.full((len(batch), width), pad_id)
    labels_BT = torch.full((len(batch), width), _IGNORED)
    for row, e in enumerate(batch):
        ids = torch.tensor(e.token_ids)
        ids_BT[row, : len(ids)] = ids
        labels_BT[row, : len(ids)] = torch.where(torch.tensor(e.sampled), ids, _IGNORED)
    return ids_BT, labels_BT

"""Log probabilities of sampled tokens, and of nothing else.

TRL's pass runs over rows padded to the longest prompt and the longest completion, and on CPU projects every position
to the vocabulary. Here rows lose their padding and whatever follows their last sampled token, rows of like length
share a forward pass, and only the positions that predict a sampled token meet the vocabulary, in tiles: no tensor of
shape (T, vocabulary) exists. Where attention can tell rows apart by their positions (FlashAttention), the rows of a
pass are laid end to end, so that not even the padding between rows of like length is left.
"""

from dataclasses import dataclass
from types import MethodType
from typing import Protocol

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel
from trl.kernels import ChunkedLogProbFunction

from repl_rl.engine.logits import Logits

TILE_CPU = 2**20
"""Numbers in a tile of logits on CPU (4 MiB): larger ones leave the cache and cost 2.5 times the time."""
TILE_GPU = 32768
"""Columns of a tile of logits elsewhere, TRL's own choice."""


class Scorer(Protocol):
    """A policy, wrapped or not, after `install`."""

    def __call__(self, *, input_ids: Tensor, sampled: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Scores:
    """Both of shape (B, T), 0 where nothing was sampled."""

    logprobs: Tensor
    """Nats; carries gradients for the rows that asked for them."""
    entropies: Tensor
    """Nats, without gradients."""


def install(model: PreTrainedModel) -> None:
    """Teach the model a second way to be called: `model(input_ids=(b, S), sampled=(b, S) bool, position_ids=None)`.

    It returns the log probabilities and entropies of the marked tokens, both (N,), rows first. It goes through the
    model's `forward`, so that wrappers (DDP, FSDP) see it.

    Raises:
        ConfigError: what the model makes of the product of hidden state and head is not understood.
    """
    logits = Logits.of(model.config)
    original = model.forward

    def forward(self: PreTrainedModel, *args: object, sampled: Tensor | None = None, **kwargs: object) -> object:
        if sampled is None:
            return original(*args, **kwargs)
        return _score(self, logits, kwargs["input_ids"], sampled, kwargs.get("position_ids"))

    model.forward = MethodType(forward, model)


def packs(model: PreTrainedModel) -> bool:
    """True when the model's attention tells rows laid end to end apart by their positions, at no cost."""
    return "flash" in str(model.config.get_text_config()._attn_implementation)


def _score(
    model: PreTrainedModel, logits: Logits, input_ids: object, sampled: Tensor, positions: object
) -> tuple[Tensor, Tensor]:
    assert isinstance(input_ids, Tensor)
    # Rows are padded on the right, so under a causal mask padding reaches no real token and needs no mask of its own.
    rows = model.base_model(input_ids=input_ids, position_ids=positions, use_cache=False).last_hidden_state
    # Nor does a row predict the next one's first token where they lie end to end: that one was not sampled.
    hidden, wanted = rows[:, :-1], sampled[:, 1:]
    head = model.get_output_embeddings()
    chosen = hidden[wanted]
    columns = max(512, TILE_CPU // max(len(chosen), 1)) if chosen.device.type == "cpu" else TILE_GPU
    logprobs, entropies, *_ = ChunkedLogProbFunction.apply(
        *(chosen, head.weight, head.bias, input_ids[:, 1:][wanted], 1.0, columns),
        *(logits.cap, logits.scale, ("entropy",)),
    )
    return logprobs, entropies


def score_rows(
    model: Scorer,
    input_ids: Tensor,
    attention: Tensor,
    sampled: Tensor,
    rows: Tensor,
    tokens_per_pass: int,
    packed: bool = False,
) -> Scores:
    """Score the sampled tokens of some rows of a padded batch.

    Under DDP and FSDP each forward pass is a meeting of all processes, and so is its way back: a process that needs
    fewer passes than another makes up for it with idle ones, in which nothing is scored. Where gradients are taken
    there is at least one pass, so that the result always has some, if only zeros.

    Args:
        input_ids: (B, S), prompts padded on the left, completions of T tokens padded on the right.
        attention: (B, S), 1 at real tokens.
        sampled: (B, T) bool.
        rows: indices of the rows to score; the others are 0 in the result.
        tokens_per_pass: rows share a forward pass up to about this many tokens.
        packed: lay the rows of a pass end to end; see `packs`.
    """
    size, width = sampled.shape
    logprobs = torch.zeros(size * width, device=input_ids.device)
    entropies = torch.zeros(size * width, device=input_ids.device)
    whole = torch.cat([sampled.new_zeros(size, input_ids.size(1) - width), sampled], dim=1)
    first = attention.int().argmax(dim=1)
    # Nothing after the last sampled token can matter to it.
    end = whole.size(1) - whole.flip(1).int().argmax(dim=1)
    lengths = torch.where(whole.any(dim=1), end - first, 1)
    parts = buckets(rows, lengths, tokens_per_pass)
    # Agreed on before the first pass: within one, the others may wait for this process already.
    passes = most(max(len(parts), int(torch.is_grad_enabled())), input_ids.device)
    for bucket in parts:
        positions = torch.arange(int(lengths[bucket].max()), device=input_ids.device).expand(len(bucket), -1)
        inside = positions < lengths[bucket, None]
        columns = (first[bucket, None] + positions).clamp(max=input_ids.size(1) - 1)
        marked = whole[bucket].gather(1, columns) & inside
        flat = (bucket[:, None] * width + columns - (input_ids.size(1) - width))[marked]
        ids = input_ids[bucket].gather(1, columns)
        if packed:
            ids, marked, positions = ids[inside][None], marked[inside][None], positions[inside][None]
        some_logprobs, some_entropies = model(input_ids=ids, sampled=marked, position_ids=positions if packed else None)
        logprobs = logprobs.index_copy(0, flat, some_logprobs.float())
        entropies = entropies.index_copy(0, flat, some_entropies.detach().float())
    for _ in range(passes - len(parts)):
        logprobs = logprobs + _idle(model, input_ids, packed)
    return Scores(logprobs.view(size, width), entropies.view(size, width))


def most(count: int, device: torch.device) -> int:
    """The largest count of any process; the wait for the others has the process group's limit."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return count
    agreed = torch.tensor(count, device=device)
    distributed.all_reduce(agreed, distributed.ReduceOp.MAX)
    return int(agreed)


def _idle(model: Scorer, input_ids: Tensor, packed: bool) -> Tensor:
    """A pass over two tokens in which nothing is scored: 0, and gradients of 0."""
    ids = input_ids[:1, :2]
    positions = torch.arange(ids.size(1), device=ids.device)[None] if packed else None
    nothing, _ = model(input_ids=ids, sampled=torch.zeros_like(ids, dtype=torch.bool), position_ids=positions)
    return nothing.float().sum()


def buckets(rows: Tensor, lengths: Tensor, tokens_per_pass: int) -> list[Tensor]:
    """Split `rows` into parts of like length, longest first, each at most `tokens_per_pass` tokens with its padding."""
    ordered = rows[lengths[rows].argsort(descending=True, stable=True)]
    parts = []
    while len(ordered):
        count = max(1, tokens_per_pass // int(lengths[ordered[0]]))
        parts.append(ordered[:count])
        ordered = ordered[count:]
    return parts

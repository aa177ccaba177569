"""Log probabilities of sampled tokens, and of nothing else.

TRL's pass runs over rows padded to the longest prompt and the longest completion, and on CPU projects every position
to the vocabulary. Here rows lose their padding and whatever follows their last sampled token, rows of like length
share a forward pass, and only the positions that predict a sampled token meet the vocabulary, in tiles: no tensor of
shape (T, vocabulary) exists. Where attention can tell rows apart by their positions (FlashAttention), the rows of a
pass are laid end to end, so that not even the padding between rows of like length is left. Rows that begin alike can
share what they begin with: see `paths`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Protocol

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel
from trl.kernels import ChunkedLogProbFunction

from repl_rl.engine.logits import Logits
from repl_rl.engine.recurrent import keeps_running_state
from repl_rl.trainer.paths import Tree, planned

TILE_CPU = 2**20
"""Numbers in a tile of logits on CPU (4 MiB): larger ones leave the cache and cost 2.5 times the time."""
TILE_GPU = 32768
"""Columns of a tile of logits elsewhere, TRL's own choice."""


class Scorer(Protocol):
    """A policy, wrapped or not, after `install`."""

    def __call__(
        self, *, input_ids: Tensor, sampled: Tensor, position_ids: Tensor | None, tree: Tree | None = None
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Scores:
    """Both of shape (B, T), 0 where nothing was sampled."""

    logprobs: Tensor
    """Nats; carries gradients for the rows that asked for them."""
    entropies: Tensor
    """Nats, without gradients."""


@dataclass(slots=True)
class Tally:
    """What sharing comes to, added up over calls."""

    rows: int = 0
    """Tokens of all rows."""
    trees: int = 0
    """Tokens of their trees, whether they were worth it or not."""
    shared: int = 0
    """Tokens of the rows that were scored as trees."""


@dataclass(frozen=True, slots=True)
class Laid:
    """Where the rows of a padded batch begin and end."""

    ids: Tensor
    """(B, S)."""
    first: Tensor
    """(B,), column of the first real token."""
    lengths: Tensor
    """(B,), tokens up to the last sampled one; 1 where nothing is sampled."""
    sampled: Tensor
    """(B, S) bool."""

    @classmethod
    def of(cls, input_ids: Tensor, attention: Tensor, sampled: Tensor) -> "Laid":
        """Those of a batch as `score_rows` takes it."""
        whole = torch.cat([sampled.new_zeros(len(sampled), input_ids.size(1) - sampled.size(1)), sampled], dim=1)
        first = attention.int().argmax(dim=1)
        # Nothing after the last sampled token can matter to it.
        end = whole.size(1) - whole.flip(1).int().argmax(dim=1)
        return cls(input_ids, first, torch.where(whole.any(dim=1), end - first, 1), whole)

    def texts(self, rows: Tensor) -> list[list[int]]:
        """The ids of some rows."""
        spans = zip(self.ids[rows].tolist(), self.first[rows].tolist(), self.lengths[rows].tolist(), strict=True)
        return [ids[start : start + length] for ids, start, length in spans]


def install(model: PreTrainedModel) -> None:
    """Teach the model a second way to be called: `model(input_ids=(b, S), sampled=(b, S) bool, position_ids=None)`.

    It returns the log probabilities and entropies of the marked tokens, both (N,), rows first. It goes through the
    model's `forward`, so that wrappers (DDP, FSDP) see it. With `tree=`, whose ids and positions the others are, the
    marked tokens are those of the tree; the model's attention must be that of `paths` then.

    Raises:
        ConfigError: what the model makes of the product of hidden state and head is not understood.
    """
    logits = Logits.of(model.config)
    original = model.forward

    def forward(self: PreTrainedModel, *args: object, sampled: Tensor | None = None, **kwargs: object) -> object:
        if sampled is None:
            return original(*args, **kwargs)
        return _score(self, logits, kwargs["input_ids"], sampled, kwargs.get("position_ids"), kwargs.get("tree"))

    model.forward = MethodType(forward, model)


def packs(model: PreTrainedModel) -> bool:
    """True when the model tells rows laid end to end apart by their positions, at no cost: its attention does, and it
    has no state that would run from a row into the next."""
    by_position = "flash" in str(model.config.get_text_config()._attn_implementation)
    return by_position and not keeps_running_state(type(model), model.config)


def _score(
    model: PreTrainedModel, logits: Logits, input_ids: object, sampled: Tensor, positions: object, tree: object
) -> tuple[Tensor, Tensor]:
    assert isinstance(input_ids, Tensor)
    head = model.get_output_embeddings()
    if isinstance(tree, Tree):
        # Four dimensions: a mask as it is, of which the model makes none of its own.
        alone = sampled.new_ones(1, 1, 1, 1)
        told = {"attention_mask": alone, "position_ids": positions, "use_cache": False, "tree": tree}
        rows = model.base_model(input_ids=input_ids, **told).last_hidden_state
        chosen, targets = rows[0, tree.before[sampled[0]]], input_ids[sampled]
    else:
        # Padded on the right: under a causal mask padding reaches no real token and needs no mask of its own. Nor does
        # it reach a state that a real token reads: convolutions and scans run from left to right.
        rows = model.base_model(input_ids=input_ids, position_ids=positions, use_cache=False).last_hidden_state
        # Nor does a row predict the next one's first token where they lie end to end: that one was not sampled.
        chosen, targets = rows[:, :-1][sampled[:, 1:]], input_ids[:, 1:][sampled[:, 1:]]
    columns = max(512, TILE_CPU // max(len(chosen), 1)) if chosen.device.type == "cpu" else TILE_GPU
    logprobs, entropies, *_ = ChunkedLogProbFunction.apply(
        *(chosen, head.weight, head.bias, targets, 1.0, columns),
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
    sharing: Tally | None = None,
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
        sharing: rows that begin alike are scored as trees where that pays, and it is added up here; None: none are.
    """
    size, width = sampled.shape
    logprobs = torch.zeros(size * width, device=input_ids.device)
    entropies = torch.zeros(size * width, device=input_ids.device)
    laid = Laid.of(input_ids, attention, sampled)
    first, lengths, whole = laid.first, laid.lengths, laid.sampled
    branches, alone = ([], rows) if sharing is None else trees(laid, rows, tokens_per_pass, sharing)
    parts = buckets(alone, lengths, tokens_per_pass)
    # Agreed on before the first pass: within one, the others may wait for this process already.
    needed = len(parts) + len(branches)
    passes = most(max(needed, int(torch.is_grad_enabled())), input_ids.device)
    for tree, members in branches:
        flat, marked, which = _marked(tree, members, laid, width)
        told = model(input_ids=tree.ids, sampled=marked, position_ids=tree.positions, tree=tree)
        # A token that rows share was scored once; each of them takes it, and their gradients add up there.
        logprobs = logprobs.index_copy(0, flat, told[0].float()[which])
        entropies = entropies.index_copy(0, flat, told[1].detach().float()[which])
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
    for _ in range(passes - needed):
        logprobs = logprobs + _idle(model, input_ids, packed)
    return Scores(logprobs.view(size, width), entropies.view(size, width))


def trees(
    laid: Laid, rows: Tensor, tokens_per_pass: int, sharing: Tally
) -> tuple[list[tuple[Tree, list[int]]], Tensor]:
    """The trees that are worth it, each with its rows of the batch, and the rows that are left, in their order."""
    numbers: list[int] = rows.tolist()
    texts = laid.texts(rows)
    found, taken = [], set[int]()
    for part in planned(texts, tokens_per_pass):
        sharing.rows += part.rows
        sharing.trees += part.tree
        if part.pays:
            sharing.shared += part.rows
            found.append(
                (Tree.of([texts[n] for n in part.members], laid.ids.device), [numbers[n] for n in part.members])
            )
            taken |= set(part.members)
    return found, rows[[n for n in range(len(texts)) if n not in taken]] if taken else rows


def _marked(tree: Tree, members: Sequence[int], laid: Laid, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where in the flat result the sampled tokens of a tree's rows go, which tokens of the tree they are, (1, T) bool,
    and for each of the former its number among the latter."""
    first: list[int] = laid.first[members].tolist()
    flat, scored = [], []
    for row, start, where in zip(members, first, tree.where, strict=True):
        marks = laid.sampled[row, start : start + len(where)].cpu()
        flat.append(row * width + marks.nonzero()[:, 0] + start - (laid.sampled.size(1) - width))
        scored.append(marks)
    marked, which = tree.marked(scored)
    return torch.cat(flat).to(marked.device), marked, which


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

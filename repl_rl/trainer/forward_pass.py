"""Forward pass that computes log probabilities of sampled tokens only.

TRL's pass runs over rows padded to the longest prompt and the longest completion. On a CPU it projects every position
to the vocabulary. Here rows lose their padding and all tokens after their last sampled one, and rows of similar length
share a forward pass. Only positions that predict a sampled token are projected to the vocabulary. Logits are computed
in tiles, so no tensor of shape (T, vocabulary) exists.

If attention separates rows by their positions (FlashAttention), the rows of a pass are packed end to end. This
removes the padding between rows of similar length too. `build_row_passes` plans the passes of plain rows, and
`compute_logprobs` runs any planned passes, such as those of `plugins/prefix_sharing`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Protocol

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel
from trl.kernels import ChunkedLogProbFunction

from repl_rl.engine.transformers_kv_cache import keeps_running_state
from repl_rl.models.transform_logits import LogitsTransform
from repl_rl.trainer.prefix_tree import PrefixTree

TILE_CPU = 2**20
"""Numbers per tile of logits on a CPU (4 MiB); larger tiles leave the cache and take 2.5 times as long."""
TILE_GPU = 32768
"""Columns per tile of logits on other devices, as in TRL."""


class ScoringModel(Protocol):
    """Policy after `install_scoring_forward`, wrapped or not."""

    def __call__(
        self, *, input_ids: Tensor, sampled: Tensor, position_ids: Tensor | None, tree: PrefixTree | None = None
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log probabilities and entropies of completions, (B, T), without prompts; 0 at tokens that were not sampled."""

    logprobs: Tensor
    """Nats; with gradients for the rows that requested them."""
    entropies: Tensor
    """Nats, without gradients."""


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Bounds of the rows of a padded batch."""

    ids: Tensor
    """(B, S), token ids."""
    first_column: Tensor
    """(B,), column of the first real token."""
    row_lengths: Tensor
    """(B,), number of tokens up to the last sampled one; 1 without sampled tokens."""
    sampled_mask: Tensor
    """(B, S) bool, True at sampled tokens."""
    completion_width: int
    """T, the number of columns of the completions, which are the last ones."""

    @classmethod
    def from_batch(cls, input_ids: Tensor, attention: Tensor, sampled: Tensor) -> "BatchLayout":
        """Compute the bounds of a batch.

        Args:
            input_ids: (B, S), prompts padded on the left, completions of T tokens padded on the right.
            attention: (B, S), 1 at real tokens.
            sampled: (B, T) bool.
        """
        mask = torch.cat([sampled.new_zeros(len(sampled), input_ids.size(1) - sampled.size(1)), sampled], dim=1)
        first_column = attention.int().argmax(dim=1)
        # Causal attention: no sampled token depends on tokens after the last one.
        end = mask.size(1) - mask.flip(1).int().argmax(dim=1)
        lengths = torch.where(mask.any(dim=1), end - first_column, 1)
        return cls(input_ids, first_column, lengths, mask, sampled.size(1))

    def get_row_ids(self, rows: Tensor) -> list[list[int]]:
        """Return the ids of some rows within their bounds."""
        spans = zip(
            self.ids[rows].tolist(), self.first_column[rows].tolist(), self.row_lengths[rows].tolist(), strict=True
        )
        return [ids[start : start + length] for ids, start, length in spans]


def install_scoring_forward(model: PreTrainedModel) -> None:
    """Add a second call signature to the model: `model(input_ids=(b, S), sampled=(b, S) bool, position_ids=None)`.

    The call returns the log probabilities and entropies of the marked tokens, both (N,), row by row. It goes through
    the model's `forward`, so that wrappers (DDP, FSDP) see it. With `tree=`, all other arguments are those of the tree,
    and the model must use the attention of `prefix_tree`.

    Raises:
        ConfigError: the model computes its logits from hidden state and head in an unsupported way.
    """
    logits = LogitsTransform.from_config(model.config)
    original = model.forward

    def forward(self: PreTrainedModel, *args: object, sampled: Tensor | None = None, **kwargs: object) -> object:
        if sampled is None:
            return original(*args, **kwargs)
        return _score_logits(self, logits, kwargs["input_ids"], sampled, kwargs.get("position_ids"), kwargs.get("tree"))

    model.forward = MethodType(forward, model)


def can_pack_rows(model: PreTrainedModel) -> bool:
    """Return True if rows can be packed end to end at no cost.

    The attention of the model must separate rows by their positions. A model with a recurrent state does not fit,
    because that state would run from a row into the next.
    """
    by_position = "flash" in str(model.config.get_text_config()._attn_implementation)
    return by_position and not keeps_running_state(type(model), model.config)


def _score_logits(
    model: PreTrainedModel, logits: LogitsTransform, input_ids: object, sampled: Tensor, positions: object, tree: object
) -> tuple[Tensor, Tensor]:
    """Return the log probabilities and entropies of the marked tokens, both (N,), nats."""
    assert isinstance(input_ids, Tensor)
    head = model.get_output_embeddings()
    if isinstance(tree, PrefixTree):
        # transformers takes a mask of four dimensions as it is, and builds no other one.
        no_mask = sampled.new_ones(1, 1, 1, 1)
        options = {"attention_mask": no_mask, "position_ids": positions, "use_cache": False, "tree": tree}
        rows = model.base_model(input_ids=input_ids, **options).last_hidden_state
        hidden, targets = rows[0, tree.predecessor[sampled[0]]], input_ids[sampled]
    else:
        # Rows are padded on the right, so a causal mask hides the padding from all real tokens. Convolutions and scans
        # run from left to right, so the padding is in no state that a real token reads.
        rows = model.base_model(input_ids=input_ids, position_ids=positions, use_cache=False).last_hidden_state
        # In packed rows, the first token of a row was not sampled, so the row before it does not predict it.
        hidden, targets = rows[:, :-1][sampled[:, 1:]], input_ids[:, 1:][sampled[:, 1:]]
    # Tiles have a fixed number of entries on a CPU, so few rows get wide tiles.
    columns = max(512, TILE_CPU // max(len(hidden), 1)) if hidden.device.type == "cpu" else TILE_GPU
    logprobs, entropies, *_ = ChunkedLogProbFunction.apply(
        *(hidden, head.weight, head.bias, targets, 1.0, columns),
        *(logits.cap, logits.scale, ("entropy",)),
    )
    return logprobs, entropies


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Inputs of one forward pass of `ScoringModel`, and the places of its scores in the result."""

    input_ids: Tensor
    """(b, S)."""
    sampled: Tensor
    """(b, S) bool, True at the tokens to score."""
    position_ids: Tensor | None
    """(b, S). None means that each row begins at position 0."""
    flat_index: Tensor
    """(N,), index of each scored token in the flattened result of shape (B, T)."""
    tree: PrefixTree | None = None
    """Tree of rows with common prefixes. None means plain rows."""
    score_index: Tensor | None = None
    """(N,), index of each token of `flat_index` in the scores of the pass. None means that the orders are equal."""


def build_row_passes(
    layout: BatchLayout, rows: Tensor, tokens_per_pass: int, packed: bool = False
) -> list[ForwardPass]:
    """Plan the forward passes of some rows of a batch; rows of similar length share one.

    Args:
        layout: bounds of the batch.
        rows: indices of the rows to score.
        tokens_per_pass: rows share a forward pass up to about this many tokens.
        packed: True packs the rows of a pass end to end; see `can_pack_rows`.
    """
    passes = []
    for bucket in bucket_by_length(rows, layout.row_lengths, tokens_per_pass):
        # Cut the rows out of the batch, so that each begins in the first column.
        lengths = layout.row_lengths[bucket]
        positions = torch.arange(int(lengths.max()), device=layout.ids.device).expand(len(bucket), -1)
        inside = positions < lengths[:, None]
        width = layout.ids.size(1)
        columns = (layout.first_column[bucket, None] + positions).clamp(max=width - 1)
        marked = layout.sampled_mask[bucket].gather(1, columns) & inside
        # A column of the result is a completion token, so columns of the prompt are subtracted.
        first_completion_column = width - layout.completion_width
        flat = (bucket[:, None] * layout.completion_width + columns - first_completion_column)[marked]
        ids = layout.ids[bucket].gather(1, columns)
        # Drop the padding: all rows of the pass become a single one.
        if packed:
            ids, marked, positions = ids[inside][None], marked[inside][None], positions[inside][None]
        passes.append(ForwardPass(ids, marked, positions if packed else None, flat))
    return passes


def compute_logprobs(
    model: ScoringModel, layout: BatchLayout, passes: Sequence[ForwardPass], packed: bool = False
) -> TokenScores:
    """Score the sampled tokens of a batch by planned forward passes; tokens of no pass are 0 in the result.

    Under DDP and FSDP, all processes run forward and backward passes together. So a process that needs fewer passes
    than another adds idle passes, which score nothing. With gradients enabled there is at least one pass, so that the
    result always has gradients, if only zeros. `packed` is the same as for `build_row_passes`.
    """
    size, width = len(layout.ids), layout.completion_width
    logprobs = torch.zeros(size * width, device=layout.ids.device)
    entropies = torch.zeros(size * width, device=layout.ids.device)
    # Processes agree on the number before the first pass; during a pass, others may already wait for this process.
    total = max_over_processes(max(len(passes), int(torch.is_grad_enabled())), layout.ids.device)
    for one in passes:
        options = {} if one.tree is None else {"tree": one.tree}
        pass_logprobs, pass_entropies = model(
            input_ids=one.input_ids, sampled=one.sampled, position_ids=one.position_ids, **options
        )
        pass_logprobs, pass_entropies = pass_logprobs.float(), pass_entropies.detach().float()
        # A shared token was scored once. All its rows take that score, and their gradients add up in it.
        if one.score_index is not None:
            pass_logprobs, pass_entropies = pass_logprobs[one.score_index], pass_entropies[one.score_index]
        logprobs = logprobs.index_copy(0, one.flat_index, pass_logprobs)
        entropies = entropies.index_copy(0, one.flat_index, pass_entropies)
    for _ in range(total - len(passes)):
        logprobs = logprobs + _run_idle_pass(model, layout.ids, packed)
    return TokenScores(logprobs.view(size, width), entropies.view(size, width))


def max_over_processes(count: int, device: torch.device) -> int:
    """Return the largest count of all processes; the process group's timeout limits the wait for the others."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return count
    largest = torch.tensor(count, device=device)
    distributed.all_reduce(largest, distributed.ReduceOp.MAX)
    return int(largest)


def _run_idle_pass(model: ScoringModel, input_ids: Tensor, packed: bool) -> Tensor:
    """Run a pass over two tokens that scores nothing, and return 0 with gradients of 0."""
    ids = input_ids[:1, :2]
    positions = torch.arange(ids.size(1), device=ids.device)[None] if packed else None
    logprobs, _ = model(input_ids=ids, sampled=torch.zeros_like(ids, dtype=torch.bool), position_ids=positions)
    return logprobs.float().sum()


def bucket_by_length(rows: Tensor, lengths: Tensor, tokens_per_pass: int) -> list[Tensor]:
    """Split `rows` into parts of similar length, longest first, each with at most `tokens_per_pass` padded tokens."""
    ordered = rows[lengths[rows].argsort(descending=True, stable=True)]
    buckets = []
    while len(ordered):
        count = max(1, tokens_per_pass // int(lengths[ordered[0]]))
        buckets.append(ordered[:count])
        ordered = ordered[count:]
    return buckets

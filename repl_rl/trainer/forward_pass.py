"""Forward pass that computes log probabilities of sampled tokens only.

TRL's pass runs over rows padded to the longest prompt and the longest completion. On a CPU it projects every position
to the vocabulary. Here rows lose their padding and all tokens after their last sampled one, and rows of similar length
share a forward pass. Only positions that predict a sampled token are projected to the vocabulary. Logits are computed
in tiles, so no tensor of shape (T, vocabulary) exists.

If attention separates rows by their positions (FlashAttention), the rows of a pass are packed end to end. This
removes the padding between rows of similar length too. Rows can share common prefixes: see `prefix_tree`.
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
from repl_rl.models.lm_head import LogitsTransform
from repl_rl.trainer.prefix_tree import PrefixTree, group_rows_into_trees

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
    """Log probabilities and entropies, both (B, T), 0 at tokens that were not sampled."""

    logprobs: Tensor
    """Nats; with gradients for the rows that requested them."""
    entropies: Tensor
    """Nats, without gradients."""


@dataclass(slots=True)
class PrefixSharingStats:
    """Token counts of prefix sharing, added up over calls."""

    rows: int = 0
    """Number of tokens of all rows."""
    tree_tokens: int = 0
    """Number of tokens of their trees, unused trees included."""
    shared_tokens: int = 0
    """Number of tokens of the rows that were scored as trees."""


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

    @classmethod
    def from_batch(cls, input_ids: Tensor, attention: Tensor, sampled: Tensor) -> "BatchLayout":
        """Compute the bounds of a batch as `compute_logprobs` takes it."""
        mask = torch.cat([sampled.new_zeros(len(sampled), input_ids.size(1) - sampled.size(1)), sampled], dim=1)
        first_column = attention.int().argmax(dim=1)
        # Causal attention: no sampled token depends on tokens after the last one.
        end = mask.size(1) - mask.flip(1).int().argmax(dim=1)
        return cls(input_ids, first_column, torch.where(mask.any(dim=1), end - first_column, 1), mask)

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


def compute_logprobs(
    model: ScoringModel,
    input_ids: Tensor,
    attention: Tensor,
    sampled: Tensor,
    rows: Tensor,
    tokens_per_pass: int,
    packed: bool = False,
    sharing: PrefixSharingStats | None = None,
) -> TokenScores:
    """Score the sampled tokens of some rows of a padded batch.

    Under DDP and FSDP, all processes run forward and backward passes together. So a process that needs fewer passes
    than another adds idle passes, which score nothing. With gradients enabled there is at least one pass, so that the
    result always has gradients, if only zeros.

    Args:
        input_ids: (B, S), prompts padded on the left, completions of T tokens padded on the right.
        attention: (B, S), 1 at real tokens.
        sampled: (B, T) bool.
        rows: indices of the rows to score; all others are 0 in the result.
        tokens_per_pass: rows share a forward pass up to about this many tokens.
        packed: True packs the rows of a pass end to end; see `can_pack_rows`.
        sharing: token counts to add to; rows with a common prefix are then scored as trees if that saves enough. None
            disables prefix sharing.
    """
    size, width = sampled.shape
    logprobs = torch.zeros(size * width, device=input_ids.device)
    entropies = torch.zeros(size * width, device=input_ids.device)
    layout = BatchLayout.from_batch(input_ids, attention, sampled)
    first_columns, lengths, sampled_mask = layout.first_column, layout.row_lengths, layout.sampled_mask
    branches, single_rows = ([], rows) if sharing is None else split_into_trees(layout, rows, tokens_per_pass, sharing)
    buckets = bucket_by_length(single_rows, lengths, tokens_per_pass)
    # Processes agree on the number before the first pass; during a pass, others may already wait for this process.
    local_passes = len(buckets) + len(branches)
    passes = max_over_processes(max(local_passes, int(torch.is_grad_enabled())), input_ids.device)
    for tree, members in branches:
        flat, marked, score_index = _locate_sampled_tokens(tree, members, layout, width)
        tree_logprobs, tree_entropies = model(
            input_ids=tree.ids, sampled=marked, position_ids=tree.positions, tree=tree
        )
        # A shared token was scored once. All its rows take that score, and their gradients add up in it.
        logprobs = logprobs.index_copy(0, flat, tree_logprobs.float()[score_index])
        entropies = entropies.index_copy(0, flat, tree_entropies.detach().float()[score_index])
    for bucket in buckets:
        # Cut the rows out of the batch, so that each begins in the first column.
        positions = torch.arange(int(lengths[bucket].max()), device=input_ids.device).expand(len(bucket), -1)
        inside = positions < lengths[bucket, None]
        columns = (first_columns[bucket, None] + positions).clamp(max=input_ids.size(1) - 1)
        marked = sampled_mask[bucket].gather(1, columns) & inside
        flat = (bucket[:, None] * width + columns - (input_ids.size(1) - width))[marked]
        ids = input_ids[bucket].gather(1, columns)
        # Drop the padding: all rows of the pass become a single one.
        if packed:
            ids, marked, positions = ids[inside][None], marked[inside][None], positions[inside][None]
        bucket_logprobs, bucket_entropies = model(
            input_ids=ids, sampled=marked, position_ids=positions if packed else None
        )
        logprobs = logprobs.index_copy(0, flat, bucket_logprobs.float())
        entropies = entropies.index_copy(0, flat, bucket_entropies.detach().float())
    for _ in range(passes - local_passes):
        logprobs = logprobs + _run_idle_pass(model, input_ids, packed)
    return TokenScores(logprobs.view(size, width), entropies.view(size, width))


def split_into_trees(
    layout: BatchLayout, rows: Tensor, tokens_per_pass: int, sharing: PrefixSharingStats
) -> tuple[list[tuple[PrefixTree, list[int]]], Tensor]:
    """Return the trees that save enough, each with its rows of the batch, and the remaining rows in order."""
    numbers: list[int] = rows.tolist()
    row_ids = layout.get_row_ids(rows)
    trees, in_trees = [], set[int]()
    # Count the tokens of unused trees too: metrics show the ratio that sharing could reach.
    for candidate in group_rows_into_trees(row_ids, tokens_per_pass):
        sharing.rows += candidate.rows
        sharing.tree_tokens += candidate.tree_tokens
        if candidate.is_worthwhile:
            sharing.shared_tokens += candidate.rows
            tree = PrefixTree.build([row_ids[n] for n in candidate.members], layout.ids.device)
            trees.append((tree, [numbers[n] for n in candidate.members]))
            in_trees |= set(candidate.members)
    return trees, rows[[n for n in range(len(row_ids)) if n not in in_trees]] if in_trees else rows


def _locate_sampled_tokens(
    tree: PrefixTree, members: Sequence[int], layout: BatchLayout, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Map the N sampled tokens of a tree's rows to the flat result and to the tree.

    Return their indices in the flat result, (N,), and the marked tokens of the tree, (1, T) bool. Return also, for each
    of the N tokens, its index among the marked ones, (N,).
    """
    first_columns: list[int] = layout.first_column[members].tolist()
    flat, row_marks = [], []
    # A column of the result is a completion token, so columns of the prompt are subtracted.
    for row, start, positions in zip(members, first_columns, tree.row_positions, strict=True):
        marks = layout.sampled_mask[row, start : start + len(positions)].cpu()
        flat.append(row * width + marks.nonzero()[:, 0] + start - (layout.sampled_mask.size(1) - width))
        row_marks.append(marks)
    marked, score_index = tree.map_row_marks(row_marks)
    return torch.cat(flat).to(marked.device), marked, score_index


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

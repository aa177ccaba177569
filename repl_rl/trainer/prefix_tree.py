"""Tree attention for rollouts with common prefixes: each shared token goes through the model once.

The tokens of a tree form one row, segment by segment. A segment attends to its path, the segments before it, and to
itself. This is plain causal attention whose queries are the last of its keys. So there is no mask of all tokens
against all, and the depth of a tree is unlimited. A sliding window means the same as in a plain row. Each token keeps
the position that it has in its rollouts.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "repl_rl"
"""Name of tree attention among the attention functions of transformers."""
WORTH = 1.3
"""Smallest ratio of row tokens to tree tokens for which a tree is used; below it, sharing saves too little."""
_UNSUPPORTED_OPTIONS = ("s_aux", "softcap", "position_bias")
"""Attention options of some models that tree attention does not support."""

TokenIds = list[int]


@dataclass(frozen=True, slots=True)
class TreeSegment:
    """Tokens of a tree between two branch points."""

    start: int
    """Index of its first token in the tree."""
    end: int
    """Index of its last token in the tree, plus one."""
    depth: int
    """Position of its first token in its rollouts, which is the number of tokens in its path."""
    path: tuple[int, ...]
    """Numbers of the segments before it, from the root on."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """Rows of ids as one row of T tokens, which holds each shared prefix once."""

    segments: tuple[TreeSegment, ...]
    """Segments in the order of the tree; a path consists of earlier segments."""
    ids: Tensor
    """(1, T), token ids."""
    positions: Tensor
    """(1, T), positions in the rollouts."""
    predecessor: Tensor
    """(T,), tree index of the previous token, which predicts each token; a first token has its own index."""
    row_positions: tuple[Tensor, ...]
    """One tensor per row, in row order, on the CPU: the tree index of each of its tokens."""
    _masks: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """Cache of `get_visible_mask`, because all layers ask for the same few masks."""

    @classmethod
    def build(cls, rows: Sequence[TokenIds], device: torch.device | str = "cpu") -> "PrefixTree":
        """Build the tree of `rows`, which have at least one token each; rows may be equal or prefixes of others."""
        segments, ends = _build_segments(rows)
        ids: list[int] = []
        predecessors: list[int] = []
        for segment, row in segments:
            ids += rows[row][segment.depth : segment.depth + segment.end - segment.start]
            # The parent's last token predicts the first token of a segment.
            parent = segments[segment.path[-1]][0].end - 1 if segment.path else segment.start
            predecessors += [parent, *range(segment.start, segment.end - 1)]
        # A token's position in its rollouts is its offset in the segment plus the depth of the segment.
        segment_indices = [torch.arange(segment.start, segment.end) for segment, _ in segments]
        depths = [segment_indices[n] - segment.start + segment.depth for n, (segment, _) in enumerate(segments)]
        row_positions = tuple(torch.cat([segment_indices[n] for n in path]) for path in ends)
        tensors = (torch.tensor([ids]), torch.cat(depths)[None], torch.tensor(predecessors))
        ids_1T, positions_1T, predecessors_T = (tensor.to(device) for tensor in tensors)
        return cls(tuple(segment for segment, _ in segments), ids_1T, positions_1T, predecessors_T, row_positions)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens per segment."""
        return [segment.end - segment.start for segment in self.segments]

    def map_row_marks(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Map marked tokens of the rows to tokens of the tree.

        Args:
            rows: one (tokens,) bool tensor on the CPU per row, with N marked tokens in all.

        Returns:
            The marked tokens of the tree, (1, T) bool. For each of the N tokens, row by row, its index among them,
            (N,); rows that share a token have the same index.
        """
        indices = torch.cat([positions[marks] for positions, marks in zip(self.row_positions, rows, strict=True)])
        marked_T = torch.zeros(self.ids.size(1), dtype=torch.bool)
        marked_T[indices] = True
        order = marked_T.cumsum(0)[indices] - 1
        return marked_T[None].to(self.ids.device), order.to(self.ids.device)

    def get_visible_mask(self, number: int, window: int | None, repeats: int) -> Tensor | None:
        """Return the attention mask of a segment, (repeats * tokens, keys) bool, or None for plain causal attention.

        Args:
            number: number of the segment, whose keys are those of its path and its own.
            window: number of last keys that a token sees, its own key included; None means all.
            repeats: number of times that the tokens are stacked, one per head of a group that shares keys.
        """
        segment = self.segments[number]
        tokens = segment.end - segment.start
        keys = segment.depth + tokens
        window = keys if window is None else min(window, keys)
        if not segment.depth and window == keys:
            return None
        # Segments of equal sizes share a mask.
        cache_key = (tokens, keys, window, repeats)
        if cache_key not in self._masks:
            keys_K = torch.arange(keys, device=self.ids.device)
            last_Q = keys_K[segment.depth :, None]
            self._masks[cache_key] = ((keys_K <= last_Q) & (keys_K > last_Q - window)).repeat(repeats, 1)
        return self._masks[cache_key]


def count_common_prefix(row: TokenIds, other: TokenIds) -> int:
    """Return the length of the common prefix of two rows."""
    # Binary search for the first difference; slices are compared in C.
    return bisect_left(range(min(len(row), len(other))), True, key=lambda n: row[: n + 1] != other[: n + 1])


def _build_segments(rows: Sequence[TokenIds]) -> tuple[list[tuple[TreeSegment, int]], list[tuple[int, ...]]]:
    """Return the segments of a tree, each with one of its rows, and the path of each row to its end."""
    # Depth-first: each entry holds the rows below one path, their depth, and that path.
    order = sorted(range(len(rows)), key=lambda n: rows[n])
    segments: list[tuple[TreeSegment, int]] = []
    ends: list[tuple[int, ...]] = [()] * len(rows)
    start = 0
    stack: list[tuple[list[int], int, tuple[int, ...]]] = [(order, 0, ())]
    while stack:
        members, depth, path = stack.pop()
        # Members that continue get a longer path in a later iteration.
        for row in members:
            ends[row] = path
        for _, branch in groupby((row for row in members if len(rows[row]) > depth), key=lambda n: rows[n][depth]):
            branch_rows = list(branch)
            # Rows are sorted, so all of them share the common prefix of the first and the last one.
            length = count_common_prefix(rows[branch_rows[0]], rows[branch_rows[-1]]) - depth
            stack.append((branch_rows, depth + length, (*path, len(segments))))
            segments.append((TreeSegment(start, start + length, depth, path), branch_rows[0]))
            start += length
    return segments, ends


@dataclass(frozen=True, slots=True)
class TreeCandidate:
    """Rows that can go through the model as one tree."""

    members: tuple[int, ...]
    """Numbers of the rows, sorted by their ids."""
    rows: int
    """Number of tokens of the rows."""
    tree_tokens: int
    """Number of tokens of their tree."""
    longest: int
    """Number of tokens of the longest row."""

    @property
    def is_worthwhile(self) -> bool:
        """True if the tree saves enough tokens to be used."""
        return self.rows >= WORTH * self.tree_tokens

    def can_join(self, size: int, shared: int, limit: int) -> bool:
        """Return True if a row of `size` tokens, of which `shared` are in the tree, may join."""
        # A row that shares at least half of itself may exceed the limit, as `group_rows_into_trees` explains.
        new_size = self.tree_tokens + size - shared
        return new_size <= limit or (2 * shared >= size and new_size <= 2 * max(limit, self.longest))

    def with_row(self, row: int, size: int, shared: int) -> "TreeCandidate":
        """Return the candidate with one more row."""
        return TreeCandidate(
            (*self.members, row), self.rows + size, self.tree_tokens + size - shared, max(self.longest, size)
        )


def group_rows_into_trees(rows: Sequence[TokenIds], limit: int) -> list[TreeCandidate]:
    """Split all rows into parts, so that rows with a common prefix are together.

    A part has a tree of up to about `limit` tokens. A row that shares at least half of itself joins up to twice
    `limit`, or up to twice the longest row. It would cost more in a separate pass.
    """
    # Neighbours in sorted order share the longest prefixes.
    candidates: list[TreeCandidate] = []
    for row in sorted(range(len(rows)), key=lambda n: rows[n]):
        size = len(rows[row])
        shared = count_common_prefix(rows[candidates[-1].members[-1]], rows[row]) if candidates else 0
        if candidates and candidates[-1].can_join(size, shared, limit):
            candidates[-1] = candidates[-1].with_row(row, size, shared)
        else:
            candidates.append(TreeCandidate((row,), size, size, size))
    return candidates


def compute_tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    tree: PrefixTree | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls it: over the paths of `tree`, or as "sdpa" without a tree.

    Args:
        query: (1, heads, T, width) with a tree; `key` and `value` may have fewer heads.
        attention_mask: ignored with a tree.

    Returns:
        (1, T, heads, width), and None in place of attention weights.

    Raises:
        ValueError: the model uses an attention option that tree attention does not support.
    """
    if tree is None:
        sdpa: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward
        arguments = {"scaling": scaling, "sliding_window": sliding_window, **options}
        return sdpa(module, query, key, value, attention_mask, **arguments)
    _validate_attention_args(options)
    heads, groups = query.size(1), key.size(1)
    repeats = heads // groups
    # Split, not sliced: the backward pass of each slice would allocate a gradient of the full size.
    queries, keys, values = (torch.split(tensor, tree.lengths, dim=2) for tensor in (query, key, value))
    outputs = []
    for number, segment in enumerate(tree.segments):
        mask = tree.get_visible_mask(number, sliding_window, repeats)
        # Keys and values are those of the whole path, queries those of the segment alone.
        path = (*segment.path, number)
        path_keys, path_values = (torch.cat([segments[n] for n in path], dim=2) for segments in (keys, values))
        segment_queries = queries[number]
        if mask is None:
            output = scaled_dot_product_attention(
                segment_queries,
                path_keys,
                path_values,
                scale=scaling,
                is_causal=segment_queries.size(2) > 1,
                enable_gqa=repeats > 1,
            )
        else:
            # Heads that share keys are stacked as queries, so that no key is repeated.
            stacked = segment_queries.reshape(1, groups, -1, segment_queries.size(3))
            output = scaled_dot_product_attention(stacked, path_keys, path_values, attn_mask=mask, scale=scaling)
        outputs.append(output.reshape(1, heads, -1, value.size(3)))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _validate_attention_args(options: dict[str, object]) -> None:
    """Raise a ValueError for an unsupported attention option, which would otherwise be ignored silently."""
    for name in _UNSUPPORTED_OPTIONS:
        if options.get(name) is not None:
            raise ValueError(f"its attention has {name}")
    if options.get("dropout"):
        raise ValueError(f"its attention drops out {options['dropout']} at random")
    if options.get("is_causal") is False:
        raise ValueError("its attention sees later tokens")


AttentionInterface.register(NAME, compute_tree_attention)
# Without a mask function, rows without a tree would lose their padding mask and their sliding window.
AttentionMaskInterface.register(NAME, sdpa_mask)

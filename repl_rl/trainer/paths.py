"""Rollouts that begin alike, laid out as a tree: what they share passes through the model once.

The tokens of a tree stand in one row, segment by segment. A segment attends to its path, which is the segments before
it, and to itself: plain causal attention whose queries are the last ones of its keys. So there is no mask of all tokens
against all, any depth will do, and a sliding window is what it is in a row. Each token has the position that it has in
its rollouts.
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
"""Of the attention, among those of transformers."""
WORTH = 1.3
"""Tokens of its rows, for each token of the tree, from which on a tree is used: below it saves too little."""
_UNKNOWN = ("s_aux", "softcap", "position_bias")
"""What some models ask of attention that is not done here."""

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of a tree between two places where rollouts part."""

    start: int
    """Place of its first token in the tree."""
    end: int
    """One past the place of its last token."""
    depth: int
    """Position of its first token in its rollouts: the tokens of its path."""
    path: tuple[int, ...]
    """Numbers of the segments before it, the first one of the rollout first."""


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """Rows of ids as one row of T tokens, in which every prefix that some of them share stands once."""

    segments: tuple[Segment, ...]
    """In the order of the tree; a path is of earlier ones."""
    ids: Tensor
    """(1, T)."""
    positions: Tensor
    """(1, T), in the rollout."""
    before: Tensor
    """(T,), the place of the token before each, which predicts it; a first token's own."""
    where: tuple[Tensor, ...]
    """A tensor a row, in the order of the rows: the place of each of its tokens. On the CPU."""
    _masks: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """Those of `seen`: all layers ask for the same few."""

    @classmethod
    def of(cls, rows: Sequence[Ids], device: torch.device | str = "cpu") -> "Tree":
        """The tree of `rows`, of at least one token each, some of which may be equal or begin others."""
        segments, ends = _grown(rows)
        ids: list[int] = []
        before: list[int] = []
        for segment, row in segments:
            ids += rows[row][segment.depth : segment.depth + segment.end - segment.start]
            parent = segments[segment.path[-1]][0].end - 1 if segment.path else segment.start
            before += [parent, *range(segment.start, segment.end - 1)]
        places = [torch.arange(segment.start, segment.end) for segment, _ in segments]
        depths = [places[n] - segment.start + segment.depth for n, (segment, _) in enumerate(segments)]
        where = tuple(torch.cat([places[n] for n in path]) for path in ends)
        told = (torch.tensor([ids]), torch.cat(depths)[None], torch.tensor(before))
        ids_1T, positions_1T, before_T = (one.to(device) for one in told)
        return cls(tuple(segment for segment, _ in segments), ids_1T, positions_1T, before_T, where)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each segment."""
        return [segment.end - segment.start for segment in self.segments]

    def marked(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Tokens of the rows as tokens of the tree.

        Args:
            rows: which of its tokens, (tokens,) bool on the CPU, a tensor a row; N of them in all.

        Returns:
            Which tokens of the tree they are, (1, T) bool, and for each of them, row by row, its number among those,
            (N,): several rows may have the same.
        """
        places = torch.cat([where[marks] for where, marks in zip(self.where, rows, strict=True)])
        found_T = torch.zeros(self.ids.size(1), dtype=torch.bool)
        found_T[places] = True
        which = found_T.cumsum(0)[places] - 1
        return found_T[None].to(self.ids.device), which.to(self.ids.device)

    def seen(self, number: int, window: int | None, repeats: int) -> Tensor | None:
        """The keys that the tokens of a segment see, (repeats * tokens, keys) bool; None: all those that are not later.

        Args:
            number: of the segment, whose keys are those of its path and its own.
            window: so many of the last keys, the token's own among them; None: all.
            repeats: how often the tokens stand below each other, as the heads that share keys do.
        """
        segment = self.segments[number]
        tokens = segment.end - segment.start
        keys = segment.depth + tokens
        window = keys if window is None else min(window, keys)
        if not segment.depth and window == keys:
            return None
        asked = (tokens, keys, window, repeats)
        if asked not in self._masks:
            keys_K = torch.arange(keys, device=self.ids.device)
            last_Q = keys_K[segment.depth :, None]
            self._masks[asked] = ((keys_K <= last_Q) & (keys_K > last_Q - window)).repeat(repeats, 1)
        return self._masks[asked]


def common(one: Ids, other: Ids) -> int:
    """How many tokens two rows begin with alike."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda n: one[: n + 1] != other[: n + 1])


def _grown(rows: Sequence[Ids]) -> tuple[list[tuple[Segment, int]], list[tuple[int, ...]]]:
    """The segments of a tree with a row that each belongs to, and the path of every row to its end."""
    order = sorted(range(len(rows)), key=lambda n: rows[n])
    segments: list[tuple[Segment, int]] = []
    ends: list[tuple[int, ...]] = [()] * len(rows)
    place = 0
    open_: list[tuple[list[int], int, tuple[int, ...]]] = [(order, 0, ())]
    while open_:
        members, depth, path = open_.pop()
        for row in members:
            ends[row] = path
        for _, branch in groupby((row for row in members if len(rows[row]) > depth), key=lambda n: rows[n][depth]):
            inside = list(branch)
            # They are in order, so what the first and the last begin with alike all of them do.
            length = common(rows[inside[0]], rows[inside[-1]]) - depth
            open_.append((inside, depth + length, (*path, len(segments))))
            segments.append((Segment(place, place + length, depth, path), inside[0]))
            place += length
    return segments, ends


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that would pass through the model as one tree."""

    members: tuple[int, ...]
    """Numbers of the rows, which are in the order of their ids."""
    rows: int
    """Their tokens."""
    tree: int
    """Tokens of their tree."""
    longest: int
    """Tokens of the longest of them."""

    @property
    def pays(self) -> bool:
        """True where it is worth it."""
        return self.rows >= WORTH * self.tree

    def fits(self, size: int, shared: int, limit: int) -> bool:
        """May a row of so many tokens, so many of them shared, join?"""
        after = self.tree + size - shared
        return after <= limit or (2 * shared >= size and after <= 2 * max(limit, self.longest))

    def joined(self, row: int, size: int, shared: int) -> "Part":
        """With that row."""
        return Part((*self.members, row), self.rows + size, self.tree + size - shared, max(self.longest, size))


def planned(rows: Sequence[Ids], limit: int) -> list[Part]:
    """All rows in parts, so that those that begin alike are together.

    A part has a tree of up to about `limit` tokens; a row that shares half of itself or more joins it up to twice that,
    or up to twice its longest row, because it would cost more in a pass of its own.
    """
    parts: list[Part] = []
    for row in sorted(range(len(rows)), key=lambda n: rows[n]):
        size = len(rows[row])
        shared = common(rows[parts[-1].members[-1]], rows[row]) if parts else 0
        if parts and parts[-1].fits(size, shared, limit):
            parts[-1] = parts[-1].joined(row, size, shared)
        else:
            parts.append(Part((row,), size, size, size))
    return parts


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    tree: Tree | None = None,
    **more: object,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: over the paths of `tree`, or that of "sdpa" where there is none.

    Args:
        query: (1, heads, T, width) with a tree, as are `key` and `value` but for their number of heads.
        attention_mask: without meaning where there is a tree.

    Returns:
        (1, T, heads, width), and no weights.

    Raises:
        ValueError: the model asks for something that is not done over paths.
    """
    if tree is None:
        plain: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward
        asked = {"scaling": scaling, "sliding_window": sliding_window, **more}
        return plain(module, query, key, value, attention_mask, **asked)
    _refuse(more)
    heads, groups = query.size(1), key.size(1)
    repeats = heads // groups
    # Split, not sliced: the way back of a slice makes a whole gradient for each.
    queries, keys, values = (torch.split(whole, tree.lengths, dim=2) for whole in (query, key, value))
    found = []
    for number, segment in enumerate(tree.segments):
        seen = tree.seen(number, sliding_window, repeats)
        path = (*segment.path, number)
        past, told = (torch.cat([parts[n] for n in path], dim=2) for parts in (keys, values))
        mine = queries[number]
        if seen is None:
            some = scaled_dot_product_attention(
                mine, past, told, scale=scaling, is_causal=mine.size(2) > 1, enable_gqa=repeats > 1
            )
        else:
            # Heads that share keys lie below each other as queries, so that no key is repeated.
            below = mine.reshape(1, groups, -1, mine.size(3))
            some = scaled_dot_product_attention(below, past, told, attn_mask=seen, scale=scaling)
        found.append(some.reshape(1, heads, -1, value.size(3)))
    return torch.cat(found, dim=2).transpose(1, 2).contiguous(), None


def _refuse(more: dict[str, object]) -> None:
    """Refuse what is not done over paths: an attention function that does not know a keyword would swallow it."""
    for name in _UNKNOWN:
        if more.get(name) is not None:
            raise ValueError(f"its attention has {name}")
    if more.get("dropout"):
        raise ValueError(f"its attention drops out {more['dropout']} at random")
    if more.get("is_causal") is False:
        raise ValueError("its attention sees later tokens")


AttentionInterface.register(NAME, attention)
# Without it, rows that come without a tree would lose their padding and their window.
AttentionMaskInterface.register(NAME, sdpa_mask)

"""Prefix sharing in the update, used only as long as checks find that it changes nothing.

`PrefixSharing` checks a model when training begins, on the rollouts of its first step, and when rollouts get much
longer. A check compares the log probabilities and gradients of a tree with those of plain rows, in the number format of
the model. The tolerance comes from plain rows: one row per pass is compared with several rows per pass. In bfloat16
this tolerance means little. Passes with the same kernels round alike, and a tree rounds differently, so rounding can
hide a mistake. A model with float32 weights is therefore compared in float32 as well.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from repl_rl.trainer.forward_pass import (
    BatchLayout,
    ForwardPass,
    ScoringModel,
    TokenScores,
    build_row_passes,
    max_over_processes,
)
from repl_rl.trainer.logprobs import LogprobScorer, ScoringBatch
from repl_rl.trainer.prefix_tree import NAME, PrefixTree, TokenIds, count_common_prefix, group_rows_into_trees

TIMES = 5.0
"""Tolerance factor: a tree may differ from one row per pass this many times as much as several rows per pass do."""
FLOORS = {torch.float16: (0.04, 0.01), torch.bfloat16: (0.3, 0.05)}
FLOOR = (1e-4, 1e-4)
"""Distances that are always allowed, per number format: log probability in nats, and gradient relative to its norm.

In float32, the smallest distance seen with an unsuitable model is 3e-4 nats. Both limits are equal there. A logit error
of d changes 1 - p, for a probability p, by a relative d, and with it the gradient.

In bfloat16, tokens of which the bundled policy is sure differ by up to 0.3 nats between any two ways to compute them
(docs/gpu.md: sampler and trainer). float16 has three more binary digits. A tree's gradient is rounded once, and the
gradients of rows are rounded once each. So the two gradients differ by a hundredth in bfloat16 without a mistake.
"""
_MAX_COMPARED_WEIGHTS = 2**24
"""Largest number of weights whose gradients are compared; the smallest tensors of all layers come first."""
FORBIDDEN = -1e20
"""Log probabilities below this one, in nats, belong to ids that are never sampled; their rounding is irrelevant."""

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers in which a token depends on earlier tokens by attention alone."""
_BRANCH_MARGIN = 128
"""Tokens before and after the branch point of rows whose gradients are compared in a step."""
_MAX_CHECKED_ROWS = 4
"""Number of rows of a tree whose log probabilities are compared in a step. With a model of 0.5 B parameters on a CPU,
scoring each of 24 rows alone took minutes."""
_MAX_GRADIENT_ROWS = 3
"""Number of rows whose gradients are compared in a step."""

Autocast = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class PrefixDeviation:
    """Distance of a tree, and of several rows per pass, from one row per pass."""

    quantity: str
    """Quantity that is compared, a log probability or a gradient, as the start of a message."""
    tree_distance: float
    """Distance of the tree from one row per pass."""
    row_distance: float
    """Distance of several rows per pass from one row per pass."""
    floor: float
    """Distance that is always allowed."""

    @property
    def tolerance(self) -> float:
        """Largest allowed distance of the tree."""
        return max(self.floor, TIMES * self.row_distance)

    @property
    def problem(self) -> str | None:
        """Error message if the tree is further away than allowed, or None."""
        if self.tree_distance <= self.tolerance:
            return None
        return f"{self.quantity} {self.tree_distance:.2g} differently with them (tolerance {self.tolerance:.2g})"


@dataclass(slots=True)
class PrefixSharingStats:
    """Token counts of prefix sharing, added up over calls."""

    rows: int = 0
    """Number of tokens of all rows."""
    tree_tokens: int = 0
    """Number of tokens of their trees, unused trees included."""
    shared_tokens: int = 0
    """Number of tokens of the rows that were scored as trees."""


ScoreRowsFn = Callable[[Tensor, int, PrefixSharingStats | None], TokenScores]
"""Function that scores rows of a step: row indices, tokens per pass, and token counts to update. None for the last
argument scores each row whole, without prefix sharing."""


class PrefixSharing:
    """Decision of one run on prefix sharing, with its checks."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        """The warning callback receives a line if prefixes are not shared because a model does not fit."""
        self.stats = PrefixSharingStats()
        """Token counts of the first scoring of the current step."""
        self.disabled = False
        """True if each row is scored whole from now on."""
        self._warn = warn
        self._warning = ""
        # Tokens of the longest row that was checked.
        self._checked_tokens = 0
        self._model: PreTrainedModel | None = None

    def install_attention(self, model: PreTrainedModel) -> None:
        """Set tree attention in `model`, if it fits; call this before the model is copied, wrapped or sharded."""
        reason = find_unsupported_feature(model)
        if reason is None:
            model.set_attn_implementation(NAME)
        else:
            self._disable(model, reason)

    @torch.no_grad()
    def check_model(self, model: PreTrainedModel, autocast: Autocast) -> None:
        """Check log probabilities and gradients of `model`, after `install_scoring_forward`, on a small tree."""
        self._model = model
        if self.disabled:
            return
        rows = _build_example_rows(model)
        scored = [torch.arange(len(row)) > 0 for row in rows]
        # Weights in float32 are checked in float32 first: rounding in a lower format would hide a mistake.
        exact = [nullcontext] if model.dtype is not get_compute_dtype(model, autocast) else []
        for context in (*exact, autocast):
            if not self.disabled:
                self._disable_if_wrong(model, self._compare(model, rows, scored, context))

    @torch.no_grad()
    def verify_batch(
        self,
        score: ScoreRowsFn,
        batch: tuple[Tensor, Tensor, Tensor],
        learning: Tensor,
        tokens: int,
        autocast: Autocast,
    ) -> None:
        """Check this step's longest tree, if it is the first one or more than twice as long as all checked ones.

        All processes call this together; a failed check of one process turns sharing off in all.

        Args:
            score: scores rows of the step.
            batch: ids, attention and scored tokens of the step, as `BatchLayout.from_batch` takes them.
            learning: (B,) bool, the rows that the loss depends on; they are scored separately from the others.
            tokens: approximate number of tokens per pass.
            autocast: gives the number format of a forward pass.
        """
        self.stats = PrefixSharingStats()
        model = self._model
        assert model is not None
        layout = BatchLayout.from_batch(*batch)
        longer = not self.disabled and int(layout.row_lengths.max()) > 2 * self._checked_tokens
        # Rows that the loss depends on are scored apart from the others, so no tree holds rows of both.
        sets = (learning, ~learning) if longer else ()
        length, members = max(
            (_find_longest_tree(layout, rows.nonzero()[:, 0], tokens) for rows in sets), default=(0, [])
        )
        # If one process checks, all do, because scoring is collective.
        if not max_over_processes(int(length > 2 * self._checked_tokens), layout.ids.device):
            return
        members = _choose_checked_rows(layout, members)
        rows = torch.tensor(members, dtype=torch.long, device=layout.ids.device)
        # At least two rows per pass: the tolerance is their distance from one row per pass.
        single_scores, several_scores = score(rows, 1, None), score(rows, max(tokens, 2 * length), None)
        tree_scores = score(rows, tokens, PrefixSharingStats())
        deviations = [
            compare_logprobs(
                single_scores.logprobs,
                tree_scores.logprobs,
                several_scores.logprobs,
                get_deviation_floors(model, autocast)[0],
            )
        ]
        # Gradients are compared only if this process has all weights.
        if members and not any(isinstance(weight, DTensor) for weight in model.parameters()):
            deviations += self._compare(model, *_cut_around_branches(layout, rows[:_MAX_GRADIENT_ROWS]), autocast)
        self._checked_tokens = max(self._checked_tokens, length)
        self._disable_if_wrong(model, deviations)
        if max_over_processes(int(self.disabled), layout.ids.device) and not self.disabled:
            self._disable(model, "another process found that it does not fit")

    def metrics(self, accelerator: Accelerator) -> dict[str, float]:
        """Return metrics under their names in `metrics.jsonl`, over all processes, which call this together."""
        counts = torch.tensor(
            [[self.stats.rows, self.stats.tree_tokens, self.stats.shared_tokens]], device=accelerator.device
        )
        rows, in_trees, shared = accelerator.gather(counts).sum(dim=0).tolist()
        return {"token_ratio": rows / in_trees if in_trees else 1.0, "shared_tokens": shared / max(rows, 1)}

    def state_dict(self) -> str:
        """Return the results of all checks so far, as JSON."""
        return json.dumps({"told": self._warning, "checked": self._checked_tokens})

    def load_state_dict(self, memory: str) -> None:
        """Restore the state that `state_dict` returned."""
        state = json.loads(memory)
        self._checked_tokens = state["checked"]
        if state["told"] and not self.disabled:
            self._warn_once(state["told"])

    def _compare(
        self, model: PreTrainedModel, rows: list[list[int]], scored: list[Tensor], autocast: Autocast
    ) -> list[PrefixDeviation]:
        """Compare a tree with its rows. If the model fails on the tree, disable sharing and return no distances."""
        try:
            return compare_tree_with_rows(model, rows, scored, autocast)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            self._disable(model, f"it does not take a tree: {str(error).partition(chr(10))[0] or repr(error)}")
            return []

    def _disable_if_wrong(self, model: PreTrainedModel, deviations: Sequence[PrefixDeviation]) -> None:
        problem = next((deviation.problem for deviation in deviations if deviation.problem is not None), None)
        if problem is not None and not self.disabled:
            self._disable(model, problem)

    def _disable(self, model: PreTrainedModel, reason: str) -> None:
        self._warn_once(f"shared prefixes off: {model.config.model_type}: {reason}; each row is scored whole")

    def _warn_once(self, message: str) -> None:
        self.disabled, self._warning = True, message
        self._warn(message)


class PrefixSharingScorer(LogprobScorer):
    """`LogprobScorer` that scores the common prefix of rows once, as long as its checks find nothing."""

    def __init__(
        self,
        model: PreTrainedModel,
        reference: PreTrainedModel | None = None,
        autocast: Autocast = nullcontext,
        tokens_per_pass: int | None = None,
        *,
        sharing: PrefixSharing,
    ) -> None:
        """See `LogprobScorer`. `sharing` has set its attention in `model`, and checks `model` now."""
        super().__init__(model, reference, autocast, tokens_per_pass)
        self._sharing = sharing
        self._step_stats: PrefixSharingStats | None = None
        sharing.check_model(model, autocast)

    def metrics(self, accelerator: Accelerator) -> dict[str, float]:
        """Return metrics of prefix sharing in the current step, over all processes."""
        return self._sharing.metrics(accelerator)

    def score_step(self, model: ScoringModel, batch: ScoringBatch, keep_graph: bool) -> TokenScores:
        """See `LogprobScorer.score_step`. The first step, and much longer ones, are checked before."""
        step = (batch.input_ids, batch.attention, batch.sampled_mask)
        layout = BatchLayout.from_batch(*step)

        def score(rows: Tensor, tokens: int, stats: PrefixSharingStats | None) -> TokenScores:
            passes = self._build_passes(layout, rows, tokens, stats)
            return self.run_passes(model, layout, passes)

        tokens_per_pass = self.get_tokens_per_pass(batch.input_ids.device)
        self._sharing.verify_batch(score, step, batch.learning_rows, tokens_per_pass, self._autocast)
        # Metrics count the tokens of this scoring alone, not those of later ones of the same step.
        self._step_stats = self._sharing.stats
        try:
            return super().score_step(model, batch, keep_graph)
        finally:
            self._step_stats = None

    def plan_passes(self, layout: BatchLayout, rows: Tensor) -> list[ForwardPass]:
        """Plan one forward pass per tree, and those of the remaining rows."""
        tokens = self.get_tokens_per_pass(layout.ids.device)
        stats = None if self._sharing.disabled else self._step_stats or PrefixSharingStats()
        return self._build_passes(layout, rows, tokens, stats)

    def _build_passes(
        self, layout: BatchLayout, rows: Tensor, tokens: int, stats: PrefixSharingStats | None
    ) -> list[ForwardPass]:
        """Return the passes of some rows, as trees if there is a `stats` to count their tokens."""
        if stats is None:
            return build_row_passes(layout, rows, tokens, self._packed)
        trees, others = split_into_trees(layout, rows, tokens, stats)
        tree_passes = [build_tree_pass(tree, members, layout) for tree, members in trees]
        return [*tree_passes, *build_row_passes(layout, others, tokens, self._packed)]


def split_into_trees(
    layout: BatchLayout, rows: Tensor, tokens_per_pass: int, stats: PrefixSharingStats
) -> tuple[list[tuple[PrefixTree, list[int]]], Tensor]:
    """Return the trees that save enough, each with its rows of the batch, and the remaining rows in order.

    The token counts are added to `stats`.
    """
    numbers: list[int] = rows.tolist()
    row_ids = layout.get_row_ids(rows)
    trees, in_trees = [], set[int]()
    # Count the tokens of unused trees too: metrics show the ratio that sharing could reach.
    for candidate in group_rows_into_trees(row_ids, tokens_per_pass):
        stats.rows += candidate.rows
        stats.tree_tokens += candidate.tree_tokens
        if candidate.is_worthwhile:
            stats.shared_tokens += candidate.rows
            tree = PrefixTree.build([row_ids[n] for n in candidate.members], layout.ids.device)
            trees.append((tree, [numbers[n] for n in candidate.members]))
            in_trees |= set(candidate.members)
    return trees, rows[[n for n in range(len(row_ids)) if n not in in_trees]] if in_trees else rows


def build_tree_pass(tree: PrefixTree, members: Sequence[int], layout: BatchLayout) -> ForwardPass:
    """Plan the forward pass of a tree, whose rows are those of the batch with the numbers `members`."""
    first_columns: list[int] = layout.first_column[members].tolist()
    flat, row_marks = [], []
    # A column of the result is a completion token, so columns of the prompt are subtracted.
    first_completion_column = layout.ids.size(1) - layout.completion_width
    for row, start, positions in zip(members, first_columns, tree.row_positions, strict=True):
        marks = layout.sampled_mask[row, start : start + len(positions)].cpu()
        flat.append(row * layout.completion_width + marks.nonzero()[:, 0] + start - first_completion_column)
        row_marks.append(marks)
    marked, score_index = tree.map_row_marks(row_marks)
    return ForwardPass(tree.ids, marked, tree.positions, torch.cat(flat).to(marked.device), tree, score_index)


def find_unsupported_feature(model: PreTrainedModel) -> str | None:
    """Return a reason that a model does not fit trees, or None if no reason is known."""
    # Layers with a running state would carry it from one segment of a tree into the next.
    text = model.config.get_text_config()
    unsupported = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if unsupported:
        return f"it has layers of {', '.join(unsupported)}"
    attention = str(text._attn_implementation)
    if attention not in ("sdpa", NAME):
        return f"its attention is {attention}, and trees take sdpa"
    if not model._can_set_attn_implementation():
        return "its attention cannot be replaced"
    # Dropout draws once per token of the tree, and plain rows draw once per row.
    for module in model.modules():
        share = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        if isinstance(share, float) and share > 0:
            return "it drops out at random, and rows would share what is drawn"
    return None


def _build_example_rows(model: PreTrainedModel) -> list[list[int]]:
    """Return three rows with two branch points, of tokens that the policy may sample."""
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    count = model.config.get_text_config().vocab_size
    allowed = torch.arange(count) if bias is None else (bias.detach().cpu()[:count] > FORBIDDEN).nonzero()[:, 0]
    # A fixed seed: every run and every process checks the same rows.
    drawn = allowed[torch.randint(len(allowed), (72,), generator=torch.Generator("cpu").manual_seed(0))].tolist()
    root, stem, *leaves = (drawn[a:b] for a, b in pairwise((0, 16, 32, 40, 52, 72)))
    return [[*root, *stem, *leaves[0]], [*root, *stem, *leaves[1]], [*root, *leaves[2]]]


def _find_longest_tree(layout: BatchLayout, rows: Tensor, tokens: int) -> tuple[int, list[int]]:
    """Return the length of the longest row in any tree, and the rows of that tree; without trees, 0 and no rows."""
    trees, _ = split_into_trees(layout, rows, tokens, PrefixSharingStats())
    return max(((max(map(len, tree.row_positions)), members) for tree, members in trees), default=(0, []))


def _choose_checked_rows(layout: BatchLayout, members: Sequence[int]) -> list[int]:
    """Return at most `_MAX_CHECKED_ROWS` rows of a tree in its order: the longest, and others at equal distances."""
    if len(members) <= _MAX_CHECKED_ROWS:
        return [*members]
    longest = max(range(len(members)), key=lambda place: int(layout.row_lengths[members[place]]))
    # Neighbours in a tree share the longest prefixes, and distant rows branch early.
    others = [place for place in range(len(members)) if place != longest]
    step = (len(others) - 1) / (_MAX_CHECKED_ROWS - 2)
    chosen = {longest, *(others[round(step * n)] for n in range(_MAX_CHECKED_ROWS - 1))}
    return [members[place] for place in sorted(chosen)]


def _cut_around_branches(layout: BatchLayout, rows: Tensor) -> tuple[list[list[int]], list[Tensor]]:
    """Return the ids of rows around their branch point, and the scored tokens among them."""
    texts, firsts = layout.get_row_ids(rows), layout.first_column[rows].tolist()
    # Keep a margin on both sides of the first branch point, so that the comparison stays cheap.
    branch = min((count_common_prefix(left, right) for left, right in pairwise(texts)), default=len(texts[0]))
    start = max(0, branch - _BRANCH_MARGIN)
    windows = [text[start : branch + _BRANCH_MARGIN] for text in texts]
    marks = []
    for row, first, text in zip(rows.tolist(), firsts, windows, strict=True):
        mask = layout.sampled_mask[row, first + start : first + start + len(text)].cpu().clone()
        # The token that predicts the first one is cut off.
        mask[:1] = False
        marks.append(mask)
    return windows, marks


def compare_tree_with_rows(
    model: PreTrainedModel, rows: Sequence[TokenIds], scored: Sequence[Tensor], autocast: Autocast = nullcontext
) -> list[PrefixDeviation]:
    """Return the distances of log probabilities and gradients between a tree of `rows` and the rows themselves.

    Args:
        model: the model after `install_scoring_forward`, not wrapped.
        rows: rows of at least two tokens.
        scored: one (tokens,) bool tensor on the CPU per row, True at scored tokens; never True at the first one.
    """
    device = model.device
    # One row per pass is the reference for both other layouts.
    single_inputs = [_ForwardInput.from_rows([row], [marks], device) for row, marks in zip(rows, scored, strict=True)]
    single, gradient = _compute_logprobs_and_gradient(model, single_inputs, autocast)
    several, several_gradient = _compute_logprobs_and_gradient(
        model, [_ForwardInput.from_rows(rows, scored, device)], autocast
    )
    tree_logprobs, tree_gradient = _compute_logprobs_and_gradient(
        model, [_ForwardInput.from_tree(rows, scored, device)], autocast
    )
    size = max(float(gradient.norm()), 1e-30)
    tree_distance, row_distance = (float((one - gradient).norm()) / size for one in (tree_gradient, several_gradient))
    gradient_deviation = PrefixDeviation(
        "its gradient is", tree_distance, row_distance, get_deviation_floors(model, autocast)[1]
    )
    return [
        compare_logprobs(single, tree_logprobs, several, get_deviation_floors(model, autocast)[0]),
        gradient_deviation,
    ]


def compare_logprobs(single: Tensor, shared: Tensor, several: Tensor, floor: float) -> PrefixDeviation:
    """Return the distances of trees (`shared`) and of `several` rows per pass from one row per pass (`single`), nats.

    `floor` is the first value of `get_deviation_floors`.
    """
    # Ids that are never sampled are left out.
    allowed = single > FORBIDDEN
    of_trees, of_rows = (
        float((one - single)[allowed].abs().max()) if allowed.any() else 0.0 for one in (shared, several)
    )
    return PrefixDeviation("it scores a token, in nats,", of_trees, of_rows, floor)


def get_deviation_floors(model: PreTrainedModel, autocast: Autocast) -> tuple[float, float]:
    """Return how far trees may always differ from rows in this dtype: log probability in nats, relative gradient."""
    return FLOORS.get(get_compute_dtype(model, autocast), FLOOR)


def get_compute_dtype(model: PreTrainedModel, autocast: Autocast) -> torch.dtype:
    """Return the number format of the computation: that of autocast, or else that of the weights."""
    with autocast():
        kind = model.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype


@dataclass(frozen=True, slots=True)
class _ForwardInput:
    """Rows that go through a model in one pass."""

    ids: Tensor
    scored_marks: Tensor
    positions: Tensor | None
    tree: PrefixTree | None
    scored_order: Tensor
    """(N,), index of each scored token of the rows, row by row, in the model's output."""

    @classmethod
    def from_rows(cls, rows: Sequence[TokenIds], scored: Sequence[Tensor], device: torch.device) -> "_ForwardInput":
        """Build a pass over plain rows, padded on the right."""
        ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
        marks = pad_sequence(list(scored), batch_first=True).to(device)
        return cls(ids, marks, None, None, torch.arange(int(marks.sum()), device=device))

    @classmethod
    def from_tree(cls, rows: Sequence[TokenIds], scored: Sequence[Tensor], device: torch.device) -> "_ForwardInput":
        """Build a pass over the tree of the rows."""
        tree = PrefixTree.build(rows, device)
        marks, order = tree.map_row_marks(scored)
        return cls(tree.ids, marks, tree.positions, tree, order)


def _compute_logprobs_and_gradient(
    model: PreTrainedModel, calls: Sequence[_ForwardInput], autocast: Autocast
) -> tuple[Tensor, Tensor]:
    """Return log probabilities, (N,), nats, and the gradient of their weighted sum for some of the model's weights.

    The model keeps no gradients. It is called without its wrapper, which would wait for the gradients of its weights.
    """
    weights = _select_compared_weights(model)
    logprobs: list[Tensor] = []
    total = torch.zeros(sum(weight.numel() for weight in weights), device=model.device)
    token_count = sum(len(call.scored_order) for call in calls)
    # All shares are positive. With both signs, equal rows would cancel out and leave only rounding.
    shares = torch.linspace(1, 2, token_count, device=model.device)
    for call in calls:
        with torch.enable_grad():
            with autocast():
                scored, _ = model(
                    input_ids=call.ids, sampled=call.scored_marks, position_ids=call.positions, tree=call.tree
                )
            call_logprobs = scored.float()[call.scored_order]
            offset = sum(len(one) for one in logprobs)
            loss = (call_logprobs * shares[offset : offset + len(call_logprobs)]).sum()
        logprobs.append(call_logprobs.detach())
        if weights:
            gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
            total += torch.cat([one.float().flatten() for one in gradients])
    return torch.cat(logprobs), total


def _select_compared_weights(model: PreTrainedModel) -> list[Tensor]:
    """Return the trained tensors whose gradients are compared: the smallest ones, and at least one."""
    trained = sorted(
        (weight for weight in model.parameters() if weight.requires_grad), key=lambda weight: weight.numel()
    )
    sizes = accumulate(weight.numel() for weight in trained)
    return [
        weight
        for weight, size in zip(trained, sizes, strict=True)
        if size <= _MAX_COMPARED_WEIGHTS or weight is trained[0]
    ]

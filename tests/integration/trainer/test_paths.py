"""Rollouts that begin alike, scored as trees: the numbers are those of rows, and each trap is refused or avoided."""

import copy
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from repl_rl.trainer.forward_pass import (
    BatchLayout,
    ForwardPass,
    TokenScores,
    build_row_passes,
    compute_logprobs,
    install_scoring_forward,
)
from repl_rl.trainer.logprobs import ScoringBatch
from repl_rl.trainer.plugins.lora import add_adapters
from repl_rl.trainer.plugins.prefix_sharing import (
    PrefixSharing,
    PrefixSharingStats,
    build_tree_pass,
    split_into_trees,
)
from repl_rl.trainer.prefix_tree import (
    NAME,
    WORTH,
    PrefixTree,
    compute_tree_attention,
    count_common_prefix,
    group_rows_into_trees,
)
from tests.support.trainer.prefix_trees import ROWS, Row, forest, make_scorer, padded
from tests.support.trainer.tiny_policies import PAD, VOCAB, tiny_model

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.2,
    "pad_token_id": PAD,
}


def windowed(window: int) -> PreTrainedModel:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window))


def checkpointed() -> PreTrainedModel:
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def with_adapters() -> PreTrainedModel:
    wrapped = add_adapters(tiny_model(), 4, 0)
    for name, weight in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.2)
    bare: PreTrainedModel = wrapped.get_base_model()
    return bare


def of_one_head_a_key() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 4}))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "heads that share keys": tiny_model,
    "a key for each head": of_one_head_a_key,
    "a window shorter than a prompt": lambda: windowed(8),
    "a window longer than a branch": lambda: windowed(27),
    "checkpointing": checkpointed,
    "adapters": with_adapters,
}


def fitted(model: PreTrainedModel) -> PreTrainedModel:
    """With attention over paths, and callable for scores."""
    said: list[str] = []
    PrefixSharing(said.append).install_attention(model)
    install_scoring_forward(model)
    assert said == []
    return model


def scored(
    model: PreTrainedModel, batch: tuple[Tensor, Tensor, Tensor], tokens: int, tally: PrefixSharingStats | None
) -> TokenScores:
    layout, rows, trees = BatchLayout.from_batch(*batch), torch.arange(len(batch[0])), list[ForwardPass]()
    if tally is not None:
        found, rows = split_into_trees(layout, rows, tokens, tally)
        trees = [build_tree_pass(tree, members, layout) for tree, members in found]
    return compute_logprobs(model, layout, [*trees, *build_row_passes(layout, rows, tokens)])


def gradients(model: PreTrainedModel, scores: TokenScores) -> list[Tensor]:
    """Of a sum in which every token has another weight above 0: equal rows shall not cancel out."""
    shares = torch.linspace(1, 2, scores.logprobs.numel()).view(scores.logprobs.shape)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return list(torch.autograd.grad((scores.logprobs * shares).sum(), weights))


def apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Relative to the length of all of them."""
    one, other = (torch.cat([g.double().flatten() for g in many]) for many in (ours, theirs))
    return float((one - other).norm() / other.norm())


@given(ROWS)
def test_every_prefix_stands_in_a_tree_once_and_every_row_is_found_in_it(rows: list[Row]) -> None:
    tree = PrefixTree.build(rows)
    for row, where in zip(rows, tree.row_positions, strict=True):
        assert tree.ids[0, where].tolist() == row
        assert tree.positions[0, where].tolist() == list(range(len(row)))
        assert tree.predecessor[where].tolist() == [int(where[0]), *where[:-1].tolist()]
    assert tree.ids.size(1) == len({tuple(row[: n + 1]) for row in rows for n in range(len(row))})


@given(ROWS)
def test_a_segment_attends_to_its_path_and_to_itself_and_to_nothing_else(rows: list[Row]) -> None:
    tree = PrefixTree.build(rows)
    places = {
        place: row[: n + 1]
        for row, where in zip(rows, tree.row_positions, strict=True)
        for n, place in enumerate(where.tolist())
    }
    for number, segment in enumerate(tree.segments):
        keys = [p for n in (*segment.path, number) for p in range(tree.segments[n].start, tree.segments[n].end)]
        seen = tree.get_visible_mask(number, None, 1)
        for query, place in enumerate(range(segment.start, segment.end)):
            visible = (
                keys[: query + 1]
                if seen is None
                else [k for k, there in zip(keys, seen[query].tolist(), strict=True) if there]
            )
            assert [tree.ids[0, k].item() for k in visible] == places[place]


@given(ROWS, st.integers(1, 20))
def test_every_row_is_in_one_part_and_no_part_is_larger_than_it_may_be(rows: list[Row], limit: int) -> None:
    parts = group_rows_into_trees(rows, limit)
    assert sorted(n for part in parts for n in part.members) == list(range(len(rows)))
    for part in parts:
        mine = [rows[n] for n in part.members]
        assert part.rows == sum(map(len, mine))
        assert part.tree_tokens == PrefixTree.build(mine).ids.size(1)
        assert part.tree_tokens <= 2 * max(limit, *map(len, mine))
        assert part.is_worthwhile == (part.rows >= WORTH * part.tree_tokens)


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_what_two_rows_begin_with_alike_ends_where_they_part(one: Row, other: Row) -> None:
    length = count_common_prefix(one, other)
    assert one[:length] == other[:length]
    assert one[length : length + 1] != other[length : length + 1] or length == len(one) == len(other)


def test_a_row_that_shares_half_of_itself_joins_a_pass_that_is_full() -> None:
    alike = [[*range(10), 50 + n, 60 + n] for n in range(4)]
    assert [part.members for part in group_rows_into_trees(alike, 13)] == [(0, 1, 2, 3)]
    strangers = [[100 * n + k for k in range(12)] for n in range(4)]
    assert [part.members for part in group_rows_into_trees(strangers, 13)] == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 999), limit=st.sampled_from([30, 70, 2000]))
def test_log_probabilities_and_gradients_of_trees_are_those_of_rows(kind: str, seed: int, limit: int) -> None:
    model = fitted(MODELS[kind]())
    batch = padded(forest(seed), 24, seed)
    if not batch[2].any():
        return
    tally = PrefixSharingStats()
    ours, theirs = scored(model, batch, limit, tally), scored(model, batch, 64, None)
    assert tally.shared_tokens > 0, "there was a tree"
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=0, atol=2e-5)
    torch.testing.assert_close(ours.entropies, theirs.entropies, rtol=0, atol=2e-5)
    assert apart(gradients(model, ours), gradients(model, theirs)) < 1e-5


@settings(max_examples=15, deadline=None)
@given(ROWS, st.integers(0, 99))
def test_equal_rows_and_rows_that_begin_others_are_scored_as_alone(rows: list[Row], seed: int) -> None:
    model = fitted(tiny_model())
    batch = padded([[7, 8, 9, *row] for row in rows], 3, seed)
    ours, theirs = scored(model, batch, 200, PrefixSharingStats()), scored(model, batch, 1, None)
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=0, atol=2e-5)
    if batch[2].any():
        assert apart(gradients(model, ours), gradients(model, theirs)) < 1e-5


def test_below_the_gate_every_number_is_what_it_was_bit_for_bit() -> None:
    rng = random.Random(0)
    rows = [[10, 11, n // 2, *(rng.randrange(3, VOCAB) for _ in range(14 + n))] for n in range(6)]
    batch = padded(rows, 3)
    learning = torch.tensor([True, False, True, True, False, True])
    step = ScoringBatch(*batch, learning)
    found: list[tuple[Tensor, ...]] = []
    shapes: list[list[torch.Size]] = []
    for sharing in (None, PrefixSharing(lambda _: None)):
        model = tiny_model()
        if sharing is not None:
            sharing.install_attention(model)
        fast = make_scorer(model, 64, sharing)
        shapes.append([])
        model.base_model.register_forward_pre_hook(
            lambda _, args, kwargs, seen=shapes[-1]: seen.append(kwargs["input_ids"].shape), with_kwargs=True
        )
        with torch.no_grad():
            first = fast.score_step(model, step, keep_graph=True)
        again = fast.rescore(model, step, torch.arange(6), with_graph=True)
        found.append((first.logprobs, again.entropies, *gradients(model, again)))
    assert shapes[0] == shapes[1]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert sharing is not None
    assert 1 < sharing.stats.rows / sharing.stats.tree_tokens < WORTH


@pytest.mark.parametrize("window", [None, 6])
def test_rows_without_a_tree_keep_padding_and_window_bit_for_bit(window: int | None) -> None:
    plain = tiny_model() if window is None else windowed(window)
    ours = copy.deepcopy(plain)
    ours.set_attn_implementation(NAME)
    ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for told in ({}, {"attention_mask": mask}):
        assert torch.equal(ours(ids, **told).logits, plain(ids, **told).logits)
    for greedy in ({"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None},):
        assert torch.equal(ours.generate(ids, **greedy), plain.generate(ids, **greedy))


@pytest.mark.parametrize("asked", ["s_aux", "softcap", "position_bias"])
def test_what_is_not_done_over_paths_is_refused_by_its_name(asked: str) -> None:
    tree = PrefixTree.build([[3, 4], [3, 5]])
    heads = torch.zeros(1, 2, 3, 4)
    called: Callable[..., object] = compute_tree_attention
    with pytest.raises(ValueError, match=f"its attention has {asked}"):
        called(nn.Identity(), heads, heads, heads, None, tree=tree, **{asked: torch.ones(2)})


def test_attention_over_paths_makes_no_whole_gradient_for_each_segment() -> None:
    """The way back of a slice makes one; that of a split makes one for all of them."""
    tree = PrefixTree.build(forest(0))
    query, key, value = (torch.randn(1, 2, tree.ids.size(1), 4, requires_grad=True) for _ in range(3))
    found, _ = compute_tree_attention(nn.Identity(), query, key, value, None, tree=tree)
    waiting, seen = [found.grad_fn], set[object]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    names = [type(node).__name__ for node in seen]
    assert "SplitWithSizesBackward0" in names
    assert not [name for name in names if name.startswith(("Slice", "Index"))]


def test_no_mask_of_all_tokens_against_all_is_made() -> None:
    tree = PrefixTree.build(forest(0, prompt=60, groups=4))
    sizes = [seen.numel() for n in range(len(tree.segments)) if (seen := tree.get_visible_mask(n, None, 1)) is not None]
    assert max(sizes) < tree.ids.size(1) ** 2 / 20


def test_only_rows_that_share_enough_are_scored_as_trees_and_the_others_keep_their_order() -> None:
    rows = [*forest(0, groups=1), *([n, *range(3, 40)] for n in (60, 61))]
    ids, attention_mask, sampled = padded(rows, 1)
    sampled[:] = attention_mask[:, -sampled.size(1) :].bool()
    tally = PrefixSharingStats()
    found, left = split_into_trees(BatchLayout.from_batch(ids, attention_mask, sampled), torch.arange(6), 60, tally)
    assert [sorted(members) for _, members in found] == [[0, 1, 2, 3]]
    assert left.tolist() == [4, 5]
    assert tally.shared_tokens == sum(map(len, rows[:4]))
    assert tally.rows == sum(map(len, rows))

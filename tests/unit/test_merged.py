"""Credit from lines that coincide: held to the definition, read aloud over exact fractions."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repl_rl.credit.advantage_estimators import (
    EPSILON,
    OUTCOME_DEVIATION,
    GroupRewards,
    compute_reward_to_go,
    load_estimator,
)
from repl_rl.credit.console_state_ids import compute_line_prefixes, compute_line_states
from repl_rl.errors import ConfigError
from tests.support.scripted_rollouts import TASK, world

BY = ["ids", "states"]
FORMS = ["baseline", "difference"]
outcomes = st.one_of(st.sampled_from([0.0, 1.0]), st.integers(-64, 64).map(lambda n: n / 32))
Path = tuple[str, ...]


def named(group: GroupRewards, rows: Sequence[Sequence[str]], by: str) -> GroupRewards:
    """The group with these names of where its lines start from."""
    names = iter([name for row in rows for name in row])
    return group.map_lines(
        lambda line: replace(line, state=next(names)) if by == "states" else replace(line, prefix=next(names))
    )


@st.composite
def groups(draw: st.DrawFn, by: str, ungraded: bool = True) -> GroupRewards:
    """Rollouts of few names, so that many of their lines coincide; by states, some lead back to where they started."""
    worth = st.one_of(st.none(), outcomes) if ungraded else outcomes
    size = draw(st.integers(1, 8))
    lengths = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    rows: list[list[str]] = []
    for length in lengths:
        row = ["start"]
        for _ in range(length - 1):
            step = draw(st.sampled_from("xy"))
            stays = by == "states" and draw(st.integers(0, 3)) == 0
            row.append(row[-1] if stays else row[-1] + step)
        rows.append(row[:length])
    values = draw(st.lists(worth, min_size=size, max_size=size))
    blank = tuple((0.0,) * length for length in lengths)
    return named(GroupRewards.from_rows(tuple(values), blank), rows, by)


def node(names_L: Sequence[str], at: int) -> Path:
    """What line `at` starts from: the places that were passed on the way."""
    return tuple(name for before, name in pairwise(names_L[: at + 1]) if name != before)


def brute_force(group: GroupRewards, by: str, form: str) -> list[list[float]]:
    """The estimator's definition, node by node, with draws that are looked up anew for each of them."""
    names = group.states_G_L if by == "states" else group.prefixes_G_L
    played = [i for i, outcome in enumerate(group.outcomes_G) if outcome is not None]
    exact = {i: Fraction(group.outcomes_G[i] or 0) for i in played}

    @cache
    def draws(here: Path) -> list[Fraction]:
        """What each rollout that came by `here` drew there at last: the place that it went to, or its end."""
        found = []
        for i in played:
            lines = [at for at in range(len(names[i])) if node(names[i], at) == here]
            if lines:
                found.append(came_to(i, lines[-1]))
            elif not names[i] and not here:
                found.append(exact[i])  # one that wrote nothing ended where all began
        return found

    def value(here: Path) -> Fraction:
        found = draws(here)
        return sum(found, Fraction()) / len(found)

    def came_to(i: int, at: int) -> Fraction:
        return value(node(names[i], at + 1)) if at + 1 < len(names[i]) else exact[i]

    def baseline(here: Path) -> Fraction:
        if not here:
            return value(())
        found = draws(here)
        if len(found) == 1:
            return baseline(here[:-1])
        return (sum(found, Fraction()) + 3 * baseline(here[:-1])) / (len(found) + 3)

    mean = sum(exact.values(), Fraction()) / max(len(exact), 1)
    spread = sum((r - mean) ** 2 for r in exact.values()) / max(len(exact) - 1, 1)
    if not spread:
        return [[0.0] * len(row) for row in group.rewards_G_L]
    scale = math.sqrt(spread) + EPSILON
    rows = []
    for i, row in enumerate(group.rewards_G_L):
        credit = []
        for at in range(len(row)):
            if i not in exact:
                credit.append(0.0)
                continue
            here = node(names[i], at)
            changed = came_to(i, at) - value(here) if here else Fraction()
            worth = came_to(i, at) - baseline(here) if form == "baseline" else exact[i] - mean + changed
            credit.append(float(worth) / scale)
        rows.append(credit)
    return rows


def name_of(by: str, form: str) -> str:
    return f"merged_prefixes(by={by!r}, form={form!r})"


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_it_is_its_definition_over_the_draws_of_each_node(by: str, form: str, data: st.DataObject) -> None:
    group = data.draw(groups(by))
    found = load_estimator(name_of(by, form))(group)
    for ours, theirs in zip(found, brute_force(group, by, form), strict=True):
        # Outcomes are 1/32 apart at least where they differ, so float32 is divided by 0.01 or more.
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_without_a_shared_prefix_it_is_outcome_bit_for_bit(by: str, form: str, data: st.DataObject) -> None:
    worth = st.one_of(st.none(), outcomes, st.floats(-3, 3))
    values = data.draw(st.lists(worth, min_size=1, max_size=8))
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=len(values), max_size=len(values)))
    rows = [["start", *(f"{i}.{at}" for at in range(1, length))][:length] for i, length in enumerate(lengths)]
    group = named(GroupRewards.from_rows(tuple(values), tuple((0.0,) * n for n in lengths)), rows, by)
    assert load_estimator(name_of(by, form))(group) == load_estimator("outcome")(group)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, deadline=None)
@given(group=groups("ids"))
def test_where_nodes_are_not_known_or_all_outcomes_are_equal_it_is_outcome_bit_for_bit(
    form: str, group: GroupRewards
) -> None:
    unknown = group.map_lines(lambda line: replace(line, prefix=None))
    assert load_estimator(name_of("ids", form))(unknown) == load_estimator("outcome")(unknown)
    equal = replace(group, rollouts=tuple(replace(rollout, outcome=0.1) for rollout in group.rollouts))
    assert load_estimator(name_of("ids", form))(equal) == load_estimator("outcome")(equal)


def test_a_line_that_several_wrote_shares_what_came_of_it_and_those_after_it_are_held_to_that() -> None:
    # Three wrote "a": two of them solved. One wrote "b" and failed.
    rows = (("s", "sa"), ("s", "sa"), ("s", "sa"), ("s", "sb"))
    group = GroupRewards.from_rows((1.0, 1.0, 0.0, 0.0), ((0.0, 0.0),) * 4, prefixes_G_L=rows)
    scale = math.sqrt(1 / 3) + EPSILON
    first, second = 2 / 3 - 1 / 2, (2 + 3 / 2) / 6
    assert load_estimator("merged_prefixes")(group) == tuple(
        pytest.approx([value / scale for value in row], abs=1e-6)
        for row in ([first, 1 - second], [first, 1 - second], [first, -second], [-0.5, -0.5])
    )
    difference = load_estimator("merged_prefixes(form='difference')")(group)
    plain = [row[0] for row in load_estimator("outcome")(group)]
    changed = [1 / 3 / scale, 1 / 3 / scale, -2 / 3 / scale, 0.0]
    assert [row[0] for row in difference] == plain
    assert [row[1] for row in difference] == pytest.approx([a + c for a, c in zip(plain, changed, strict=True)])


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, deadline=None)
@given(group=groups("ids"), entries=st.lists(st.sampled_from([0.0, -0.125, -0.25]), min_size=1, max_size=5))
def test_shaping_within_its_bound_and_rewards_as_they_were_given_come_on_top(
    form: str, group: GroupRewards, entries: list[float]
) -> None:
    shaping = tuple(tuple(entries[n % len(entries)] for n in range(len(row))) for row in group.rewards_G_L)
    rewards = tuple(tuple(0.5 * (at == 1) + s for at, s in enumerate(row)) for row in shaping)
    earned = GroupRewards.from_rows(group.outcomes_G, rewards, (), shaping, 0.25, group.prefixes_G_L)
    name = name_of("ids", form)
    for full, bare, shaped, given_L in zip(
        load_estimator(name)(earned),
        load_estimator(name)(group),
        earned.compute_shaping_to_go(),
        earned.given_G_L,
        strict=True,
    ):
        added = [s / OUTCOME_DEVIATION + g for s, g in zip(shaped, compute_reward_to_go(given_L, 1.0), strict=True)]
        assert [a - b for a, b in zip(full, bare, strict=True)] == pytest.approx(added, abs=1e-6)


def test_rollouts_of_thousands_of_lines_are_no_deeper_than_ones_of_few() -> None:
    rows = (tuple(map(str, range(5000))),) * 2
    group = GroupRewards.from_rows((0.0, 1.0), ((0.0,) * 5000,) * 2, prefixes_G_L=rows)
    assert {len(row) for row in load_estimator("merged_prefixes")(group)} == {5000}


def test_the_prefix_of_a_line_is_named_by_all_ids_before_it_and_its_state_by_what_ran() -> None:
    plain, spaced, other = (
        asyncio.run(world([line, "x\n", "submit_final_answer(42)\n"]).collect([TASK]))[0]
        for line in ("x = 6 * 7\n", "x = 6*7\n", "x = 42\n")
    )
    prefixes = [compute_line_prefixes(t) for t in (plain, spaced, other)]
    assert [len(names) for names in prefixes] == [3, 3, 3]
    assert len({names[0] for names in prefixes}) == 1, "all start from the prompt"
    assert len({names[1] for names in prefixes}) == 3, "three ways to write a line"
    assert compute_line_prefixes(plain) == compute_line_prefixes(replace(plain, id="again"))
    assert compute_line_states(plain) == compute_line_states(spaced) != compute_line_states(other)


def test_two_consoles_that_answered_a_line_differently_are_two_places() -> None:
    one, two = (
        asyncio.run(world([f"{line}\n", "submit_final_answer(42)\n"]).collect([TASK]))[0] for line in ("'a'", "'b'")
    )
    mixed = replace(one, segments=(one.segments[0], two.segments[1], *one.segments[2:]))
    assert compute_line_prefixes(mixed)[0] == compute_line_prefixes(one)[0]
    assert compute_line_prefixes(mixed)[1] != compute_line_prefixes(one)[1]


def test_an_option_that_it_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="by of estimator merged_prefixes"):
        load_estimator("merged_prefixes(by='luck')")
    with pytest.raises(ConfigError, match="its options are by, form"):
        load_estimator("merged_prefixes(pseudo_draws=3)")

"""One line's reward reaches the gradient of exactly the tokens that an estimator's definition allows."""

import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repl_rl.credit.advantage_estimators import ESTIMATORS
from repl_rl.credit.console_state_ids import compute_line_states
from repl_rl.credit.rewards import NO_SHAPING
from repl_rl.trajectory.trajectory import NamedReward, Observed, Sampled, Segment, Trajectory
from tests.support.trainer.grpo_runs import SMALL, token_gradients
from tests.support.trainer.tiny_policies import draw, prompt_of, trajectory_of

Place = tuple[int, int]
"""A rollout of the group, and one of its lines."""


def rewarded(t: Trajectory, rewards_L: Sequence[float]) -> Trajectory:
    rewards = iter(rewards_L)
    segments: list[Segment] = [
        Sampled(tuple(replace(line, rewards=(NamedReward("given", next(rewards)),)) for line in segment.lines))
        if isinstance(segment, Sampled)
        else segment
        for segment in t.segments
    ]
    return replace(t, segments=tuple(segments))


Rows = Sequence[Sequence[float]]


def allowed(name: str, group: Sequence[Trajectory], before: Rows, after: Rows, i: int, at: int) -> set[Place]:
    """The lines whose advantage depends on the reward of line `at` of rollout `i`, by the estimator's definition."""
    every = {(j, k) for j, t in enumerate(group) for k in range(len(t.lines))}
    if name == "outcome":
        return set()
    if name == "two_stream":
        return {(j, k) for j, k in every if before[j][k] or after[j][k]}
    if name == "return_to_go":
        return {place for place in every if left_to_earn(before, *place) != left_to_earn(after, *place)}
    if name == "state_anchor":
        states = [compute_line_states(t) for t in group]
        return {place for place in every if anchored(states, before, *place) != anchored(states, after, *place)}
    assert name == "process", "write down what a new estimator allows"
    outcomes = [t.outcome or 0.0 for t in group]
    return {place for place in every if supervised(outcomes, before, *place) != supervised(outcomes, after, *place)}


def mean(values: Sequence[Fraction]) -> Fraction:
    return sum(values, Fraction()) / len(values)


def above_baseline(own: Fraction, others: Sequence[Fraction]) -> Fraction:
    return own - max(mean(others), min(Fraction(), max(own, *others)))


def anchored(states: Sequence[Sequence[str]], rows: Rows, j: int, k: int) -> Fraction:
    """What the line has still to earn beyond what others had who came by its state, exactly; 0 where none did."""

    def earned(i: int, at: int) -> Fraction:
        return sum((Fraction(19, 20) ** (n - at) * Fraction(rows[i][n]) for n in range(at, len(rows[i]))), Fraction())

    state = states[j][k]
    others = [earned(i, row.index(state)) for i, row in enumerate(states) if i != j and state in row]
    return above_baseline(earned(j, k), others) if others else Fraction()


def supervised(outcomes: Sequence[float], rows: Rows, j: int, k: int) -> list[Fraction]:
    """All that `process` makes of a line: the steps of the group and its own from there on, and so for penalties."""
    steps = sorted(Fraction(r) for row in rows for r in row if r > 0) + [Fraction(r) for r in outcomes]
    own = [Fraction(r) for r in rows[j][k:]]
    squares = [Fraction(r) ** 2 for row in rows for r in row if r < 0]
    divisor = max(Fraction(1, 4), mean(squares)) if squares else Fraction(1, 4)
    penalties = sum((r for r in own if r < 0), Fraction())
    return [*steps, sum((r for r in own if r > 0), Fraction()), penalties, divisor if penalties else Fraction()]


def left_to_earn(rows: Rows, j: int, k: int) -> Fraction:
    """What the line has still to earn beyond what the others had, on average, at its step: exactly."""
    exact = [[Fraction(value) for value in row] for row in rows]
    step = sum(r > 0 for r in rows[j][:k])
    rest: list[Fraction] = []
    for row in exact[:j] + exact[j + 1 :]:
        places = [at for at in range(len(row)) if sum(r > 0 for r in row[:at]) == step]
        rest.append(sum(row[places[0] if places else len(row) - 1 :], Fraction()))
    return above_baseline(sum(exact[j][k:], Fraction()), rest)


def moved(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], group: Sequence[Trajectory]
) -> set[Place]:
    """Lines all of whose tokens have another gradient; anything between all and none, or at an observation, fails."""
    found: set[Place] = set()
    for j, (t, row, other) in enumerate(zip(group, before, after, strict=True)):
        changed = iter([a != b for a, b in zip(row, other, strict=True)])
        number = 0
        for segment in t.segments:
            if isinstance(segment, Observed):
                assert not any(next(changed) for _ in segment.token_ids), "a token that the console printed"
                continue
            for line in segment.lines:
                (whole,) = {next(changed) for _ in line.token_ids}
                found |= {(j, number)} if whole else set()
                number += 1
        assert not any(changed), "padding"
    return found


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_reward_of_a_line_moves_exactly_the_tokens_that_its_estimator_allows(name: str, seed: int) -> None:
    rng = random.Random(seed)
    plain = [trajectory_of(prompt_of("task 0"), draw(rng), [-1.0] * 60, number) for number in range(3)]
    rewards = [[rng.choice([0.0, rng.uniform(-1, 1)]) for _ in t.lines] for t in plain]
    i = rng.randrange(3)
    at = rng.randrange(len(rewards[i]))
    changed = [list(row) for row in rewards]
    changed[i][at] += rng.choice([-1, 1]) * rng.uniform(0.2, 0.7)
    before, after = (gradients(name, plain, values) for values in (rewards, changed))
    assert moved(before, after, plain) == allowed(name, plain, rewards, changed, i, at)


def gradients(name: str, plain: Sequence[Trajectory], rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """d loss / d log probability of each token of a group whose lines earn these rewards and nothing else."""
    group = [rewarded(t, row) for t, row in zip(plain, rewards, strict=True)]
    config = replace(SMALL, estimator=name, rewards=NO_SHAPING)
    with TemporaryDirectory() as folder:
        rows: list[list[float]] = token_gradients(group, config, Path(folder))[0].tolist()
    return rows

"""One line's reward reaches the gradient of exactly the tokens that an estimator's definition allows."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repl_rl.credit.advantages import ESTIMATORS
from repl_rl.credit.rewards import NO_SHAPING
from repl_rl.credit.states import line_states
from repl_rl.record.trajectory import NamedReward, Observed, Sampled, Segment, Trajectory
from tests.trainer.policies import draw, prompt_of, trajectory_of
from tests.trainer.test_grpo import SMALL, token_gradients

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


def allowed(name: str, group: Sequence[Trajectory], paid: set[Place], i: int, at: int) -> set[Place]:
    """The lines whose advantage depends on the reward of line `at` of rollout `i`; `paid` lines earned something."""
    every = {(j, k) for j, t in enumerate(group) for k in range(len(t.lines))}
    before = {(i, k) for k in range(at + 1)}
    if name == "outcome":
        return set()
    if name == "two_stream":
        return paid
    if name == "return_to_go":
        last = len(group[i].lines) - 1
        return before | {(j, k) for j, k in every if j != i and min(k, last) <= at}
    if name == "state_anchor":
        states = {(j, k): state for j, t in enumerate(group) for k, state in enumerate(line_states(t))}
        shared = {place for place in every if list(states.values()).count(states[place]) > 1}
        return {place for place in shared if states[place] in {states[b] for b in before}}
    assert name == "process", "write down what a new estimator allows"
    return every


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
    rows = rewards + changed
    paid = {(j % 3, k) for j, row in enumerate(rows) for k, reward in enumerate(row) if reward}
    before, after = (gradients(name, plain, values) for values in (rewards, changed))
    assert moved(before, after, plain) == allowed(name, plain, paid, i, at)


def gradients(name: str, plain: Sequence[Trajectory], rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """d loss / d log probability of each token of a group whose lines earn these rewards and nothing else."""
    group = [rewarded(t, row) for t, row in zip(plain, rewards, strict=True)]
    config = replace(SMALL, estimator=name, rewards=replace(NO_SHAPING, bound=100.0))
    with TemporaryDirectory() as folder:
        rows: list[list[float]] = token_gradients(group, config, Path(folder))[0].tolist()
    return rows

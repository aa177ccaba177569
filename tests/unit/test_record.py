"""What a rollout has recorded: it only grows, and every mask follows from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.errors import ConfigError, InvariantError
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Execution, Line, LineEnd, LineStatus, Observed, Prompt, Stop
from repl_rl.trajectory.trajectory_builder import EpisodeRecorder, RolloutSpec

ORIGIN = RolloutSpec("0-t-0", Task("t", "q", "a"), Prompt("q", (1, 2)), 0, 0)
ids = st.lists(st.integers(0, 99), min_size=1, max_size=4).map(tuple)
steps = st.lists(st.tuples(st.sampled_from(["sample", "observe", "reward"]), ids), max_size=30)


def line(token_ids: tuple[int, ...], end: LineEnd = LineEnd.MATCH) -> Line:
    return Line(token_ids, (-0.5,) * len(token_ids), "x", end)


@given(steps)
def test_mask_ids_and_rewards_are_those_of_what_was_recorded(plan: list[tuple[str, tuple[int, ...]]]) -> None:
    record = EpisodeRecorder(ORIGIN)
    seen: list[int] = []
    mask: list[bool] = []
    rewards: list[list[float]] = []
    for kind, token_ids in plan:
        if kind == "sample":
            record.append_line(line(token_ids))
            rewards.append([])
        elif kind == "observe" and record.last_line is not None:
            record.append_observation(Observed("o", token_ids))
        elif kind == "reward" and rewards:
            number = token_ids[0] % len(rewards)
            record.add_reward(float(token_ids[-1]), "r", number)
            rewards[number].append(float(token_ids[-1]))
            continue
        else:
            continue
        seen += token_ids
        mask += [kind == "sample"] * len(token_ids)
    t = record.build_trajectory(Stop.FINISHED, 0.0, None, (1, 2, *seen))
    assert (list(t.completion_ids), list(t.loss_mask)) == (seen, mask)
    assert [[r.value for r in x.rewards] for x in t.lines] == rewards
    assert record.line_count == len(rewards)


def test_an_id_that_the_engine_saw_and_the_record_has_not_is_noticed() -> None:
    record = EpisodeRecorder(ORIGIN)
    record.append_line(line((5,)))
    with pytest.raises(InvariantError, match="I5"):
        record.build_trajectory(Stop.FINISHED, 0.0, None, (1, 2, 6))
    with pytest.raises(InvariantError, match="I5"):
        record.build_trajectory(Stop.FINISHED, 0.0, None, (1, 2, 5, 7))


def test_an_observation_follows_a_closed_line() -> None:
    record = EpisodeRecorder(ORIGIN)
    with pytest.raises(ConfigError, match="an observation follows a sampled line"):
        record.append_observation(Observed("o", (3,)))
    record.append_line(line((3,)))
    record.append_observation(Observed("o", (3,)))
    with pytest.raises(ConfigError, match="an observation follows a sampled line"):
        record.append_observation(Observed("o", (3,)))
    record.append_line(line((3,), LineEnd.LENGTH))
    with pytest.raises(ConfigError, match="a cut line has ended the rollout"):
        record.append_observation(Observed("o", (3,)))


def test_lines_are_found_by_number_as_in_a_list() -> None:
    record = EpisodeRecorder(ORIGIN)
    for token in (3, 4):
        record.append_line(line((token,)))
    record.record_execution(Execution(LineStatus.OK, 0.0))
    record.add_reward(1.0, "first", 0)
    record.add_reward(2.0, "last", -1)
    lines = record.build_trajectory(Stop.FINISHED, 0.0, None, None).lines
    assert [[r.name for r in x.rewards] for x in lines] == [["first"], ["last"]]
    assert [x.execution is not None for x in lines] == [False, True]
    for number in (2, -3):
        with pytest.raises(ConfigError, match="2 lines were sampled"):
            record.add_reward(1.0, "r", number)

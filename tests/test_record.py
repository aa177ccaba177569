"""What a rollout has recorded: it only grows, and every mask follows from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.errors import ConfigError, InvariantError
from repl_rl.record.record import Origin, Record
from repl_rl.record.trajectory import Execution, Line, LineEnd, LineStatus, Observed, Prompt, Stop
from repl_rl.tasks import Task

ORIGIN = Origin("0-t-0", Task("t", "q", "a"), Prompt("q", (1, 2)), 0, 0)
ids = st.lists(st.integers(0, 99), min_size=1, max_size=4).map(tuple)
steps = st.lists(st.tuples(st.sampled_from(["sample", "observe", "reward"]), ids), max_size=30)


def line(token_ids: tuple[int, ...], end: LineEnd = LineEnd.MATCH) -> Line:
    return Line(token_ids, (-0.5,) * len(token_ids), "x", end)


@given(steps)
def test_mask_ids_and_rewards_are_those_of_what_was_recorded(plan: list[tuple[str, tuple[int, ...]]]) -> None:
    record = Record(ORIGIN)
    seen: list[int] = []
    mask: list[bool] = []
    rewards: list[list[float]] = []
    for kind, token_ids in plan:
        if kind == "sample":
            record.sampled(line(token_ids))
            rewards.append([])
        elif kind == "observe" and record.last is not None:
            record.observed(Observed("o", token_ids))
        elif kind == "reward" and rewards:
            number = token_ids[0] % len(rewards)
            record.reward(float(token_ids[-1]), "r", number)
            rewards[number].append(float(token_ids[-1]))
            continue
        else:
            continue
        seen += token_ids
        mask += [kind == "sample"] * len(token_ids)
    t = record.trajectory(Stop.FINISHED, 0.0, None, (1, 2, *seen))
    assert (list(t.completion_ids), list(t.loss_mask)) == (seen, mask)
    assert [[r.value for r in x.rewards] for x in t.lines] == rewards
    assert record.line_count == len(rewards)


def test_an_id_that_the_engine_saw_and_the_record_has_not_is_noticed() -> None:
    record = Record(ORIGIN)
    record.sampled(line((5,)))
    with pytest.raises(InvariantError, match="I5"):
        record.trajectory(Stop.FINISHED, 0.0, None, (1, 2, 6))
    with pytest.raises(InvariantError, match="I5"):
        record.trajectory(Stop.FINISHED, 0.0, None, (1, 2, 5, 7))


def test_an_observation_follows_a_closed_line() -> None:
    record = Record(ORIGIN)
    with pytest.raises(ConfigError, match="an observation follows a sampled line"):
        record.observed(Observed("o", (3,)))
    record.sampled(line((3,)))
    record.observed(Observed("o", (3,)))
    with pytest.raises(ConfigError, match="an observation follows a sampled line"):
        record.observed(Observed("o", (3,)))
    record.sampled(line((3,), LineEnd.LENGTH))
    with pytest.raises(ConfigError, match="a cut line ends the rollout"):
        record.observed(Observed("o", (3,)))


def test_lines_are_found_by_number_as_in_a_list() -> None:
    record = Record(ORIGIN)
    for token in (3, 4):
        record.sampled(line((token,)))
    record.executed(Execution(LineStatus.OK, 0.0))
    record.reward(1.0, "first", 0)
    record.reward(2.0, "last", -1)
    lines = record.trajectory(Stop.FINISHED, 0.0, None, None).lines
    assert [[r.name for r in x.rewards] for x in lines] == [["first"], ["last"]]
    assert [x.execution is not None for x in lines] == [False, True]
    for number in (2, -3):
        with pytest.raises(ConfigError, match="2 lines were sampled"):
            record.reward(1.0, "r", number)

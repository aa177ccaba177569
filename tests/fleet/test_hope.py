"""How long a fleet goes on without a node, or without its cluster."""

import pytest

from repl_rl.errors import BrokenDown
from repl_rl.rollout.fleet.hope import Hope
from repl_rl.rollout.fleet.members import Lost, Waits

WAITS = Waits(patience_s=10, open_s=100, silent_s=30)
LOST = [Lost("node 0", "a", "first"), Lost("node 1", "b", "struck"), Lost("node 2", "a", "frozen")]


def test_patience_is_counted_from_the_last_moment_with_a_node_however_often_one_is_tried() -> None:
    hope = Hope("ray", WAITS, 0)
    hope.manned(5)
    assert [hope.left_s(now_s, False, LOST) for now_s in (5, 9, 14)] == [10, 6, 1]
    with pytest.raises(BrokenDown, match="without a node for 10 s") as raised:
        hope.left_s(15, False, LOST)
    assert "(node 2 at a: frozen; node 1 at b: struck)" in str(raised.value)


def test_the_last_words_of_a_seat_are_those_of_the_last_node_that_could_play_there() -> None:
    hope = Hope("ray", WAITS, 0)
    lost = [
        Lost("node 0", "a", "first", could_play=True),
        Lost("node 1", "b", "never came"),
        Lost("node 2", "a", "out of memory", could_play=True),
        Lost("node 3", "a", "its machine has gone"),
        Lost("node 4", "b", "never came either"),
    ]
    with pytest.raises(BrokenDown, match="without a node") as raised:
        hope.left_s(10, False, lost)
    assert "(node 4 at b: never came either; node 2 at a: out of memory)" in str(raised.value)


def test_a_node_that_opens_its_world_may_take_its_time() -> None:
    hope = Hope("ray", WAITS, 0)
    assert hope.left_s(50, True, []) == 50
    with pytest.raises(BrokenDown, match=r"without a node for 100 s \(none could be started\)"):
        hope.left_s(100, True, [])


def test_a_cluster_that_stays_silent_ends_the_run_although_its_nodes_play() -> None:
    hope = Hope("ray", WAITS, 0)
    hope.answered(20)
    hope.silent("it took longer than 15 s")
    hope.manned(49)
    assert hope.left_s(49, False, []) == 10
    hope.manned(50)
    with pytest.raises(BrokenDown, match=r"has not answered for 30 s \(it took longer than 15 s\)") as raised:
        hope.left_s(50, False, [])
    assert raised.value.exit_code == 3


def test_a_cluster_that_answers_again_is_used_on() -> None:
    hope = Hope("ray", WAITS, 0)
    hope.silent("it took longer than 15 s")
    hope.answered(29)
    hope.manned(60)
    assert hope.left_s(60, False, []) == 10

"""How long a fleet goes on without a node, or without its cluster."""

import pytest

from repl_rl.errors import UnrecoverableError
from repl_rl.ray.worker_pool import LivenessTimer, LostWorker, WorkerTimeouts

WAITS = WorkerTimeouts(no_worker_timeout_s=10, open_timeout_s=100, cluster_timeout_s=30)
LOST = [LostWorker("node 0", "a", "first"), LostWorker("node 1", "b", "struck"), LostWorker("node 2", "a", "frozen")]


def test_patience_is_counted_from_the_last_moment_with_a_node_however_often_one_is_tried() -> None:
    hope = LivenessTimer("ray", WAITS, 0)
    hope.worker_ready(5)
    assert [hope.remaining_s(now_s, False, LOST) for now_s in (5, 9, 14)] == [10, 6, 1]
    with pytest.raises(UnrecoverableError, match="without a node for 10 s") as raised:
        hope.remaining_s(15, False, LOST)
    assert "(node 2 at a: frozen; node 1 at b: struck)" in str(raised.value)


def test_the_last_words_of_a_seat_are_those_of_the_last_node_that_could_play_there() -> None:
    hope = LivenessTimer("ray", WAITS, 0)
    lost = [
        LostWorker("node 0", "a", "first", could_play=True),
        LostWorker("node 1", "b", "never came"),
        LostWorker("node 2", "a", "out of memory", could_play=True),
        LostWorker("node 3", "a", "its machine has gone"),
        LostWorker("node 4", "b", "never came either"),
    ]
    with pytest.raises(UnrecoverableError, match="without a node") as raised:
        hope.remaining_s(10, False, lost)
    assert "(node 4 at b: never came either; node 2 at a: out of memory)" in str(raised.value)


def test_a_node_that_opens_its_world_may_take_its_time() -> None:
    hope = LivenessTimer("ray", WAITS, 0)
    assert hope.remaining_s(50, True, []) == 50
    with pytest.raises(UnrecoverableError, match=r"without a node for 100 s \(none could be started\)"):
        hope.remaining_s(100, True, [])


def test_a_cluster_that_stays_silent_ends_the_run_although_its_nodes_play() -> None:
    hope = LivenessTimer("ray", WAITS, 0)
    hope.cluster_ok(20)
    hope.cluster_error("it took longer than 15 s")
    hope.worker_ready(49)
    assert hope.remaining_s(49, False, []) == 10
    hope.worker_ready(50)
    with pytest.raises(UnrecoverableError, match=r"has not answered for 30 s \(it took longer than 15 s\)") as raised:
        hope.remaining_s(50, False, [])
    assert raised.value.exit_code == 3


def test_a_cluster_that_answers_again_is_used_on() -> None:
    hope = LivenessTimer("ray", WAITS, 0)
    hope.cluster_error("it took longer than 15 s")
    hope.cluster_ok(29)
    hope.worker_ready(60)
    assert hope.remaining_s(60, False, []) == 10

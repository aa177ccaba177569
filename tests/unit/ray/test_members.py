"""How long the owner of a fleet waits for a node."""

import asyncio

import pytest

from repl_rl.errors import WorkerLost
from repl_rl.ray.worker_pool import WorkerTimeouts, call_with_timeout


class Pausable(asyncio.SelectorEventLoop):
    """A loop under which the machine can be paused."""

    paused_s = 0.0

    def time(self) -> float:
        return super().time() + self.paused_s


def test_a_node_that_answers_is_not_lost_because_its_owner_stood_still() -> None:
    async def alive() -> str:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Pausable)
        loop.paused_s += 3600
        for _ in range(100):
            await asyncio.sleep(0)
        return "alive"

    with asyncio.Runner(loop_factory=Pausable) as runner:
        assert runner.run(call_with_timeout(10, "an answer", alive())) == "alive"


def test_a_node_that_does_not_answer_is_lost_and_its_call_has_ended() -> None:
    ended = []

    async def silent() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(WorkerLost, match=r"an answer took longer than 0\.05 s"):
        asyncio.run(call_with_timeout(0.05, "an answer", silent()))
    assert ended == [True]


def test_what_a_node_raises_is_raised() -> None:
    async def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(call_with_timeout(10, "an answer", broken()))


def test_a_seat_rests_the_longer_the_more_of_its_nodes_have_played_nothing_and_is_never_lost() -> None:
    waits = WorkerTimeouts(retry_backoff_s=1.0, max_retry_backoff_s=300.0)
    assert [waits.compute_backoff_s(failed) for failed in range(5)] == [1.0, 1.0, 2.0, 4.0, 8.0]
    assert waits.compute_backoff_s(100_000) == 300.0

"""The pool leases each console once, refills in the background, and loses none when a rollout is cancelled."""

import asyncio

import pytest

from repl_rl.errors import SandboxFault
from repl_rl.sandbox.console_pool import ConsolePool


class _Console:
    """Counts how many of its kind are open."""

    open = 0
    is_dead = False

    def __init__(self) -> None:
        _Console.open += 1
        self.closed = False

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        _Console.open -= 1


class _Maker:
    """Opens consoles when it is told to."""

    def __init__(self, *, faults: int = 0) -> None:
        self.faults = faults
        self.at_once = self.most_at_once = self.made = 0

    async def __call__(self) -> _Console:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        if self.faults:
            self.faults -= 1
            raise SandboxFault("no console")
        self.made += 1
        return _Console()


def _pool(maker: _Maker, *, warm: int = 2, starting: int = 2) -> ConsolePool[_Console]:
    return ConsolePool(maker, warm=warm, starting=starting)


@pytest.fixture(autouse=True)
def none_left_open() -> None:
    _Console.open = 0


def test_a_console_is_leased_once_and_closed_after() -> None:
    async def main() -> None:
        pool, seen = _pool(_Maker()), set()
        for _ in range(5):
            async with pool.lease() as console:
                seen.add(id(console))
                held = console
            assert held.closed
        assert len(seen) >= 1
        await pool.close()

    asyncio.run(main())
    assert _Console.open == 0


def test_leased_consoles_count_as_warm_and_are_replaced_when_their_leases_end() -> None:
    async def main() -> None:
        pool = _pool(_Maker(), warm=3, starting=3)

        async def settle() -> int:
            for _ in range(20):
                await asyncio.sleep(0)
            return _Console.open

        pool.start_missing()
        assert await settle() == 3
        async with pool.lease(), pool.lease():
            assert await settle() == 3
            async with pool.lease(), pool.lease():
                assert await settle() == 4
        assert await settle() == 3
        await pool.close()

    asyncio.run(main())
    assert _Console.open == 0


def test_no_more_consoles_start_at_once_than_allowed() -> None:
    async def main() -> _Maker:
        maker = _Maker()
        pool = _pool(maker, warm=10, starting=3)

        async def use() -> None:
            async with pool.lease():
                await asyncio.sleep(0)

        await asyncio.gather(*(use() for _ in range(40)))
        await pool.close()
        return maker

    maker = asyncio.run(main())
    assert maker.most_at_once == 3
    assert maker.made >= 40
    assert _Console.open == 0


def test_a_start_that_fails_is_tried_again_and_then_reported_to_everybody_who_waits() -> None:
    async def main() -> None:
        pool = _pool(_Maker(faults=2), warm=0)
        async with pool.lease():
            pass
        pool = _pool(_Maker(faults=1000), warm=0)
        with pytest.raises(SandboxFault, match="no console"):
            async with pool.lease():
                pass
        await pool.close()

    asyncio.run(main())
    assert _Console.open == 0


def test_a_rollout_that_is_cancelled_while_it_waits_loses_no_console() -> None:
    async def main() -> None:
        pool = _pool(_Maker(), warm=0, starting=1)

        async def use() -> None:
            async with pool.lease():
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(use()) for _ in range(12)]
        for task in tasks[::2]:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await pool.close()

    asyncio.run(main())
    assert _Console.open == 0


def test_a_closed_pool_refuses() -> None:
    async def main() -> None:
        pool = _pool(_Maker())
        pool.start_missing()
        await pool.close()
        with pytest.raises(SandboxFault, match="closed"):
            async with pool.lease():
                pass

    asyncio.run(main())
    assert _Console.open == 0

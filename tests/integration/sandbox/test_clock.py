"""The deadline of a line: what counts as its time."""

import asyncio
import signal

from repl_rl.sandbox.console_client import LineTimer

STILL_S = 0.5
LIMIT_S = 0.2


def stand_still() -> None:
    """What a machine that is paused does: nothing of this process goes on."""
    signal.sigtimedwait([], STILL_S)


async def struck_after(*pauses: bool) -> float:
    """Seconds until the clock strikes, beside pauses of the machine, each right after it began or went on."""
    loop, struck = asyncio.get_running_loop(), asyncio.Event()
    clock = LineTimer(struck.set)
    begun_s = loop.time()
    clock.start(LIMIT_S)
    for held in pauses:
        if held:
            clock.pause()
        stand_still()
        if held:
            clock.resume()
        for _ in range(3):
            await asyncio.sleep(0)
            assert not struck.is_set()
    await struck.wait()
    return loop.time() - begun_s - STILL_S * len(pauses)


def test_a_line_has_its_time_and_no_more() -> None:
    assert LIMIT_S - 0.01 <= asyncio.run(struck_after()) < LIMIT_S + STILL_S


def test_a_pause_of_the_whole_machine_is_no_time_of_a_line() -> None:
    assert asyncio.run(struck_after(False)) >= 0.7 * LIMIT_S


def test_neither_is_what_the_host_works_for_it() -> None:
    assert asyncio.run(struck_after(True, True)) >= 0.7 * LIMIT_S


def test_a_clock_that_was_stopped_never_strikes() -> None:
    async def work() -> bool:
        struck = asyncio.Event()
        clock = LineTimer(struck.set)
        clock.start(LIMIT_S / 10)
        clock.stop()
        other = asyncio.Event()
        LineTimer(other.set).start(LIMIT_S)
        await other.wait()
        return struck.is_set()

    assert not asyncio.run(work())

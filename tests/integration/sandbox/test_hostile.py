"""Hostile lines end by their deadline with the status that is promised, and neither siblings nor the host notice."""

import asyncio
import contextlib
import os
from dataclasses import replace

import pytest

from repl_rl.sandbox import Limits, Sandbox, open_sandbox
from tests.support.sandbox.attacks import ATTACKS, Attack

LIMITS = replace(Limits(), line_timeout_s=1.0, interrupt_grace_s=0.3, memory_mb=128, output_bytes=8192, disk_mb=4)
SLACK_S = 2.0
AT_ONCE = 4


async def _attack(sandbox: Sandbox, attack: Attack) -> list[str]:
    problems = []
    async with sandbox.session() as session:
        space = await session.push("print(__import__('os').readlink('/proc/self/ns/pid'))")
        assert space.text.startswith("pid:"), space
        assert space.text.strip() != os.readlink("/proc/self/ns/pid"), "not isolated: nothing hostile is run"
        result = None
        for line in attack.lines:
            result = await session.push(line)
            if result.elapsed_s > LIMITS.line_timeout_s + SLACK_S:
                problems.append(f"{attack.name}: {line!r} took {result.elapsed_s:.1f} s")
            if len(result.text.encode()) > LIMITS.output_bytes * 3:
                problems.append(f"{attack.name}: {len(result.text)} characters")
            if session.ended:
                break
        assert result is not None
        if result.status not in attack.expected:
            problems.append(f"{attack.name}: {result.status.value}, {result.text[-300:]!r}")
        if not session.ended:
            after = await session.push("1 + 1")
            if after.elapsed_s > LIMITS.line_timeout_s + SLACK_S:
                problems.append(f"{attack.name}: the line after took {after.elapsed_s:.1f} s")
    return problems


async def _sibling(sandbox: Sandbox, stop: asyncio.Event) -> list[str]:
    """Counts in one console all the while; also in one line that is slower than most of its kind."""
    problems = []
    async with sandbox.session() as session:
        await session.push("n = 0")
        count = 0
        while not stop.is_set():
            count += 1
            result = await session.push("n += 1; print('sibling', n)")
            if result.text != f"sibling {count}\n":
                problems.append(f"sibling line {count}: {result}")
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.05)
    return problems


def _host() -> tuple[bool, int]:
    """What an escape would change: the file that one attack writes to /dev/shm, and this process's descriptors."""
    return os.path.exists("/dev/shm/x"), len(os.listdir("/proc/self/fd"))


def test_the_corpus_is_large() -> None:
    assert len(ATTACKS) >= 60
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)


@pytest.mark.heavy
@pytest.mark.alone
def test_hostile_lines_end_in_time_with_the_promised_status_and_siblings_do_not_notice() -> None:
    async def main() -> list[str]:
        problems: list[str] = []
        waiting = list(ATTACKS)
        async with open_sandbox("local", limits=LIMITS, warm=2) as sandbox:
            stop = asyncio.Event()
            sibling = asyncio.create_task(_sibling(sandbox, stop))

            async def worker() -> None:
                while waiting:
                    problems.extend(await _attack(sandbox, waiting.pop()))

            await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
            stop.set()
            problems += await sibling
        return problems

    before = _host()
    problems = asyncio.run(main())
    assert not problems, "\n".join(problems)
    assert _host() == before

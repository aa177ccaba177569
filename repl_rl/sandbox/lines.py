"""Execution of a policy's line that has several physical lines. A token can contain more than one newline."""

from collections.abc import Sequence

from repl_rl.record.trajectory import LineStatus
from repl_rl.sandbox.base import PushResult, SandboxSession


async def push_lines(console: SandboxSession, lines: Sequence[str]) -> PushResult:
    """Run at least one physical line, in order, until the console ends. Return one result for all of them.

    The outputs are joined. The first line whose status is neither ok nor incomplete decides the status.
    """
    return combined(await push_each(console, lines))


async def push_each(console: SandboxSession, lines: Sequence[str]) -> list[PushResult]:
    """As `push_lines`, but return one result per executed line."""
    results: list[PushResult] = []
    for line in lines:
        results.append(await console.push(line))
        if console.ended:
            break
    return results


def combined(results: Sequence[PushResult]) -> PushResult:
    """Combine results, at least one, into one."""
    if len(results) == 1:
        return results[0]
    plain = (LineStatus.OK, LineStatus.INCOMPLETE)
    deciding = next((r for r in results if r.status not in plain), results[-1])
    return PushResult(
        text="".join(r.text for r in results),
        more=results[-1].more,
        status=deciding.status,
        answer=deciding.answer,
        elapsed_s=sum(r.elapsed_s for r in results),
        cut=any(r.cut for r in results),
    )

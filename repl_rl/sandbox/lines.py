"""One line of a policy may be several physical lines: a token can close more than one."""

from collections.abc import Sequence

from repl_rl.record.trajectory import LineStatus
from repl_rl.sandbox.base import PushResult, SandboxSession


async def push_lines(console: SandboxSession, lines: Sequence[str]) -> PushResult:
    """Give a console at least one physical line, in order, until it ends. One result for all of them.

    Their outputs are joined; the first line that is more than fine decides the status.
    """
    return combined(await push_each(console, lines))


async def push_each(console: SandboxSession, lines: Sequence[str]) -> list[PushResult]:
    """As `push_lines`, but a result for each line that the console was given."""
    results: list[PushResult] = []
    for line in lines:
        results.append(await console.push(line))
        if console.ended:
            break
    return results


def combined(results: Sequence[PushResult]) -> PushResult:
    """One result for several (at least one)."""
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

"""Things that are done at the same time."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager


@asynccontextmanager
async def at_once() -> AsyncIterator[asyncio.TaskGroup]:
    """A group of coroutines. Where one fails the others are cancelled, and its error is raised by itself."""
    failures: Sequence[Exception] = ()
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failed:
        failures = failed.exceptions
    if failures:
        raise failures[0]  # not inside the block above: it keeps its own cause

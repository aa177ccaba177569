"""Coroutines that run concurrently."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager


@asynccontextmanager
async def at_once() -> AsyncIterator[asyncio.TaskGroup]:
    """Open a group of coroutines.

    If one fails, the others are cancelled, and its error is raised without an exception group.
    """
    failures: Sequence[Exception] = ()
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failed:
        failures = failed.exceptions
    if failures:
        raise failures[0]  # outside the block above, so that the error keeps its own cause

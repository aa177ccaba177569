"""`repl-rl bench serve`: a server under load, and its resources before and after.

The server is a separate process, started as a user does, with the bundled policy. One other process on the same cores
runs all clients. Each conversation sends its next request as soon as the last one is answered.
"""

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter

import httpx

from benchmarks.serving.load_clients import TURNS, Crowd, Gone, Heard, Leaving, Talking, quantiles
from benchmarks.serving.load_server import Look, Server
from repl_rl.errors import ConfigError, EngineError
from repl_rl.tasks import Split, load_tasks
from repl_rl.utils.hardware import count_cores

_WARM = 0.1
"""Warm-up time as a share of the measured time, so that caches are full before memory is read."""
_CROWD = 4
"""Turns that are requested at once, as a multiple of those that run or may wait."""
_LEAVERS = 32
"""Number of clients that disconnect, one after the other, on an idle server."""
_LOOK_S = 5.0
_QUESTIONS = 240
Tell = Callable[[str], None]


@dataclass(frozen=True)
class LoadConfig:
    """Number of clients, and duration of the load."""

    conversations: int = 64
    """Concurrent conversations, >= 1."""
    seconds: float = 300.0
    """Duration of the load, seconds, > 0."""
    concurrency: int = 8
    """Turns that the server runs at once, >= 1; see `repl-rl serve`."""
    engine: str = "vllm"
    """Inference engine: vllm or transformers."""
    sandbox: str = "local"
    """Sandbox in which lines run."""

    def __post_init__(self) -> None:
        for name in ("conversations", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "give at least 1")
        if self.seconds <= 0:
            raise ConfigError("seconds", self.seconds, "give more than 0")


def run_load(config: LoadConfig, tell: Tell) -> dict[str, object]:
    """Measure, and return the content of `bench serve --json`.

    Raises:
        ConfigError: the server does not start.
        EngineError: it does not respond, or does not become idle.
    """
    flags = ("--engine", config.engine, "--sandbox", config.sandbox, "--concurrency", str(config.concurrency))
    # One more place in the queue than conversations, for the client that disconnects.
    bounds = ("--max-waiting", str(config.conversations + 1), "--max-conversations", str(config.conversations))
    with Server((*flags, *bounds)) as server:
        try:
            found = asyncio.run(_Load(config, server, tell).measured())
        except httpx.HTTPError as error:
            raise EngineError(f"the server does not answer: {error!r}") from error
        code, left = server.stopped()
    tell(f"exit code {code}, {left} processes left")
    return {**found, "exit_code": code, "left": left}


class _Load:
    """One measurement."""

    def __init__(self, config: LoadConfig, server: Server, tell: Tell) -> None:
        self._config = config
        self._server = server
        self._tell = tell
        tasks = load_tasks("builtin:quickstart", split=Split.HELD_OUT, count=_QUESTIONS)
        self._questions = [task.question for task in tasks]

    async def measured(self) -> dict[str, object]:
        """Run all parts of the measurement, one after the other."""
        config = self._config
        # Warm up, then compare resources of the idle server before and after the load.
        await self._talk(config.seconds * _WARM)
        before = await self._server.idle()
        began_s, looks = perf_counter(), list[Look]()
        looking = asyncio.create_task(self._look(looks))
        heard, left_s = await self._talk(config.seconds)
        looking.cancel()
        elapsed_s = perf_counter() - began_s
        self._tell(f"{heard.turns} turns in {elapsed_s:.0f} s, errors: {dict(heard.errors) or 'none'}")
        after = await self._server.idle()
        # Disconnects on an idle server, and more requests at once than the queue holds.
        gone = await self._leave_alone()
        crowd = await self._crowd()
        return {
            "cpus": count_cores(),
            "load_average": os.getloadavg()[0],
            "engine": config.engine,
            "sandbox": config.sandbox,
            "conversations": config.conversations,
            "concurrency": config.concurrency,
            "turns_of_a_conversation": TURNS,
            "elapsed_s": elapsed_s,
            "turns": heard.turns,
            "full": heard.full,
            "lines": len(heard.line_s),
            "errors": dict(heard.errors),
            "place_s": quantiles(heard.place_s),
            "first_s": quantiles(heard.first_s),
            "line_s": quantiles(heard.line_s),
            "before": asdict(before),
            "after": asdict(after),
            "looks": [asdict(look) for look in looks],
            "left_under_load_s": quantiles(left_s),
            "left_alone_s": quantiles([each.freed_s for each in gone]),
            "left_alone_console_s": quantiles([each.console_s for each in gone]),
            "crowd": crowd,
        }

    async def _talk(self, seconds: float) -> tuple[Heard, Sequence[float]]:
        """Run conversations for `seconds`, with a client that disconnects again and again."""
        until_s, heard, left_s = perf_counter() + seconds, Heard(), list[float]()
        async with self._server.client() as client:
            # Each conversation starts at another question.
            asking = (self._questions[number:] + self._questions[:number] for number in range(_QUESTIONS))
            chosen = itertools.islice(itertools.cycle(asking), self._config.conversations)
            talking = asyncio.gather(*(Talking(client, questions, heard).until(until_s) for questions in chosen))
            leaving = Leaving(client, self._server, self._questions[0])
            try:
                while perf_counter() < until_s:
                    left_s.append((await leaving.once()).freed_s)
                await talking
            finally:
                talking.cancel()
        return heard, left_s

    async def _leave_alone(self) -> Sequence[Gone]:
        """Measure disconnects on an idle server."""
        async with self._server.client() as client:
            leaving = Leaving(client, self._server, self._questions[0])
            gone = [await leaving.once(alone=True) for _ in range(_LEAVERS)]
        self._tell(f"{len(gone)} clients left: all was free within {max(each.console_s for each in gone):.3f} s")
        return gone

    async def _crowd(self) -> dict[str, object]:
        size, found = _CROWD * (self._config.concurrency + self._config.conversations + 1), Crowd()
        async with self._server.client() as client:
            await found.ask(client, self._questions, size)
        self._tell(f"{size} at once: {found.played} played, {len(found.refused_s)} refused, others {found.others}")
        return {
            "asked": size,
            "played": found.played,
            "refused": len(found.refused_s),
            "others": dict(found.others),
            "refused_s": quantiles(found.refused_s),
            "retry_after_s": quantiles(found.retry_after_s),
        }

    async def _look(self, looks: list[Look]) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            looks.append(self._server.look())

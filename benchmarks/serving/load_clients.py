"""Clients of the load test and their measurements.

Summary statistics of times.
"""

import asyncio
import itertools
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import httpx

from benchmarks.serving.load_server import Server, alive
from repl_rl.errors import EngineError

TURNS = 4
"""Turns per conversation, all in one console."""
_TICK_S = 0.005
_GONE_S = 30.0
"""Timeout for engine and console to become free after a disconnect, seconds."""
_TRIES = 40
"""Maximum number of turns in a row that may end before their client disconnects; after them the test fails."""
_LEFT = "repl_rl_turns_abandoned_total"
_ENDED = 'repl_rl_requests_total{path="/v1/completions",status="200"}'
"""Metric that counts completed turns of the disconnecting client, the only one that uses this path."""
Event = Mapping[str, object]


@dataclass(slots=True)
class Heard:
    """Measurements of all conversations."""

    turns: int = 0
    full: int = 0
    """Conversations that ended early because the context was full."""
    place_s: list[float] = field(default_factory=list)
    """Seconds from a request to the start of its turn."""
    first_s: list[float] = field(default_factory=list)
    """Seconds from a request to the first text of its response, which is a line."""
    line_s: list[float] = field(default_factory=list)
    """Seconds from the start of a turn, or from the line before, until a line has run and is reported."""
    errors: Counter[str] = field(default_factory=Counter)


class Talking:
    """Client that runs one conversation after the other, without a pause. It stops after an error."""

    def __init__(self, client: httpx.AsyncClient, questions: Sequence[str], heard: Heard) -> None:
        self._client = client
        self._questions = itertools.cycle(questions)
        self._heard = heard
        self._failed = False

    async def until(self, until_s: float) -> None:
        """Run conversations until `until_s` of the clock."""
        while perf_counter() < until_s and not self._failed:
            await self._conversation(until_s)

    async def _conversation(self, until_s: float) -> None:
        id: str | None = None
        keep = True
        try:
            for turn in range(TURNS):
                # The last turn of a conversation asks the server to close its console.
                keep = turn < TURNS - 1 and perf_counter() < until_s
                going_on = await self._turn(question(next(self._questions), stream=True, repl=_repl(id, keep)))
                if going_on is None:
                    break
                id = going_on
            # It ended early, because the context is full or the console has ended, so delete it.
            if keep and id is not None:
                await self._client.delete(f"conversations/{id}")
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self._fail(f"{type(error).__name__}: {error}")

    async def _turn(self, asked: Mapping[str, object]) -> str | None:
        """Request a turn. Return the id of the conversation, or None if it has ended."""
        asked_s, told = perf_counter(), _Times()
        async with self._client.stream("POST", "chat/completions", json=asked) as response:
            if response.status_code != 200:
                await response.aread()
                self._refused(response)
                return None
            last = await told.follow(response)
        self._heard.place_s.append(told.begun_s - asked_s)
        self._heard.first_s += [told.first_s - asked_s] if told.first_s else []
        self._heard.line_s += told.line_s
        self._heard.turns += 1
        if "stop" not in last:
            self._fail(f"the stream ended with {last}")
        going_on = last.get("conversation")
        return None if going_on is None else str(going_on)

    def _refused(self, response: httpx.Response) -> None:
        code = response.json()["error"]["code"]
        if code == "context_length_exceeded":
            self._heard.full += 1
        else:
            self._fail(f"{response.status_code} {code}")

    def _fail(self, why: str) -> None:
        self._failed = True
        self._heard.errors[why] += 1


@dataclass(slots=True)
class _Times:
    """Times of the events of one stream, by the clock; 0 means not yet."""

    begun_s: float = 0.0
    first_s: float = 0.0
    line_s: list[float] = field(default_factory=list)

    async def follow(self, response: httpx.Response) -> Event:
        """Read the stream to its end. Return the last event's `repl` field."""
        last: Event = {}
        before_s = 0.0
        async for event in events(response):
            # The first event marks the start of the turn; times per line count from it.
            now_s = perf_counter()
            self.begun_s = self.begun_s or now_s
            before_s = before_s or now_s
            self.first_s = self.first_s or (now_s if text_of(event) else 0.0)
            last = ours(event)
            if "line" in last:
                self.line_s.append(now_s - before_s)
                before_s = now_s
        return last


@dataclass(frozen=True, slots=True)
class Gone:
    """Delays until the resources of a disconnected client were free, seconds."""

    freed_s: float
    """Until the turn ended, its engine session closed and its console was returned."""
    console_s: float
    """Until its console's process ended too; nan means that it was not measured."""


class Leaving:
    """Client that disconnects after the first line of each request."""

    def __init__(self, client: httpx.AsyncClient, server: Server, text: str) -> None:
        self._client = client
        self._server = server
        self._asked = {"model": Server.model, "prompt": f"{text}\n>>> ", "stream": True}

    async def once(self, *, alone: bool = False) -> Gone:
        """Request a turn, disconnect, and wait until its resources are free.

        With `alone` no other client is active, so a process that ends belongs to its console. A turn that ended before
        the disconnect does not count, and another one is requested.

        Raises:
            EngineError: the resources are not freed, or turns always end before the disconnect.
        """
        for _ in range(_TRIES):
            # Only with a settled set of processes can the end of the console's process be seen.
            there = await self._server.settled() if alone else frozenset[int]()
            before = await self._server.figures(self._client)
            left_s = await self._left()
            gone = await self._freed(before, left_s, there)
            if gone is not None:
                return gone
        raise EngineError(f"{_TRIES} turns ended before their client was gone: a line does not come when it is written")

    async def _left(self) -> float:
        """Request a turn and disconnect after its first text; return the time of the disconnect."""
        async with self._client.stream("POST", "completions", json=self._asked) as response:
            async for event in events(response):
                if text_of(event):
                    break
            return perf_counter()

    async def _freed(self, before: Mapping[str, float], left_s: float, there: frozenset[int]) -> Gone | None:
        """Poll until the resources are free. Return None if the turn ended before the disconnect."""
        freed_s = console_s = 0.0
        while not (freed_s and (console_s or not there)):
            # Any process that disappears is the console's, because the server was idle.
            if not all(map(alive, there)):
                console_s = console_s or perf_counter()
            if not freed_s:
                now = await self._server.figures(self._client)
                if now.get(_ENDED, 0.0) > before.get(_ENDED, 0.0):
                    return None
                freed_s = perf_counter() if now[_LEFT] > before[_LEFT] else 0.0
            if perf_counter() - left_s > _GONE_S:
                raise EngineError(f"a client went away, and what it held is not free after {_GONE_S:.0f} s")
            await asyncio.sleep(_TICK_S)
        return Gone(freed_s - left_s, max(freed_s, console_s) - left_s if there else float("nan"))


@dataclass(slots=True)
class Crowd:
    """Many turns requested at once, and their responses."""

    played: int = 0
    refused_s: list[float] = field(default_factory=list)
    """Seconds until each refusal (status 429, with a Retry-After header)."""
    retry_after_s: list[float] = field(default_factory=list)
    """Values of their Retry-After headers, seconds."""
    others: Counter[str] = field(default_factory=Counter)
    """Counts of all other responses and errors."""

    async def ask(self, client: httpx.AsyncClient, questions: Sequence[str], size: int) -> None:
        """Send `size` requests at once."""
        async with asyncio.TaskGroup() as group:
            for text in itertools.islice(itertools.cycle(questions), size):
                group.create_task(self._one(client, question(text)))

    async def _one(self, client: httpx.AsyncClient, asked: Mapping[str, object]) -> None:
        asked_s = perf_counter()
        try:
            said = await client.post("chat/completions", json=asked)
        except httpx.HTTPError as error:
            self.others[type(error).__name__] += 1
            return
        if said.status_code == 200:
            self.played += 1
        elif said.status_code == 429 and "retry-after" in said.headers:
            self.refused_s.append(perf_counter() - asked_s)
            self.retry_after_s.append(float(said.headers["retry-after"]))
        else:
            self.others[str(said.status_code)] += 1


def question(text: str, **more: object) -> dict[str, object]:
    """Return a request of /v1/chat/completions, greedy by default."""
    return {"model": Server.model, "messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def ours(event: Event) -> Event:
    """Return the field `repl` of an event."""
    found = event.get("repl", {})
    assert isinstance(found, dict)
    return found


def text_of(event: Event) -> str:
    """Return the new text of an event."""
    choices = event["choices"]
    assert isinstance(choices, list)
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


async def events(response: httpx.Response) -> AsyncIterator[Event]:
    """Yield the events of a stream.

    Raises:
        ValueError: the stream reports an error.
    """
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ValueError(event["error"]["message"])
            yield event


def _repl(id: str | None, keep: bool) -> Mapping[str, object]:
    return {"keep": keep} if id is None else {"keep": keep, "conversation": id}


def quantiles(values: Sequence[float]) -> Mapping[str, float]:
    """Return `count`, `p50`, `p99` and `max`, by nearest rank, of measured values. Empty input gives only `count`."""
    if not values:
        return {"count": 0}
    ranked = sorted(values)
    at = {name: ranked[math.ceil(share * len(ranked)) - 1] for name, share in (("p50", 0.5), ("p99", 0.99))}
    return {"count": len(ranked), **at, "max": ranked[-1]}

"""Whoever goes away, reads slowly, or stops the server: nothing is played for nobody, and nothing is left."""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from starlette.types import Message

from repl_rl.engine import EngineSession, Sampling, ScriptedEngine
from repl_rl.errors import UnrecoverableError
from repl_rl.rollout import Rollouts
from repl_rl.sandbox import open_sandbox
from repl_rl.serve.auth import ApiKeys
from repl_rl.serve.conversation_service import OnTurnUpdate, ServerLimits, TurnResult, TurnService
from repl_rl.serve.openai_requests import ChatCompletionRequest, parse_request
from repl_rl.serve.openai_responses import ResponseBuilder, TurnResponse
from repl_rl.serve.prometheus_metrics import ServerMetrics
from repl_rl.serve.routes import ServerApp
from tests.support.processes import descendants, identity, wait_for
from tests.support.scripted_rollouts import RENDERER
from tests.support.serve.http_server import (
    BOUNDS,
    LIMIT_S,
    Counting,
    Stuck,
    ask,
    opened,
    ours,
    question,
    scripted,
    served,
    stream,
)
from tests.support.serve.raw_requests import FREED_S, everything, freed, program, sent


@pytest.mark.heavy
@pytest.mark.alone
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"repl": {"keep": True}}])
def test_a_client_that_goes_away_frees_engine_and_console_within_a_second(more: dict[str, object]) -> None:
    stuck = Stuck()
    with served(scripted(stuck)) as server:
        connection = sent(server, **more)
        assert stuck.reached.wait(LIMIT_S)
        server.wait(lambda: server.engine.open_sessions == server.sandbox.open == 1)
        gone_s = time.monotonic()
        connection.close()
        freed(server, gone_s)
        assert server.figure("repl_rl_running") == server.figure("repl_rl_conversations") == 0
        assert server.figure("repl_rl_turns_abandoned_total") == 1


@pytest.mark.heavy
@pytest.mark.alone
def test_a_client_that_is_reset_is_gone_too() -> None:
    stuck = Stuck()
    with served(scripted(stuck)) as server:
        connection = sent(server, stream=True)
        assert stuck.reached.wait(LIMIT_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        gone_s = time.monotonic()
        connection.close()
        freed(server, gone_s)


def test_whoever_leaves_while_waiting_gives_the_place_in_the_queue_back() -> None:
    stuck = Stuck()
    with served(
        scripted(stuck), ServerLimits(max_concurrent=1, max_waiting=1, max_conversations=1, conversation_timeout_s=600)
    ) as server:
        first = stream(server.client(), "Six?")
        next(iter(first))
        second = sent(server)
        server.wait(lambda: server.figure("repl_rl_waiting") == 1)
        second.close()
        server.wait(lambda: server.figure("repl_rl_waiting") == 0)
        server.thread.call_soon(stuck.may_go_on.set)
        list(first)


def test_a_reader_that_takes_nothing_holds_neither_engine_nor_console_and_is_hung_up_on() -> None:
    async def main() -> None:
        rollouts = scripted()
        desk = TurnService(rollouts, BOUNDS, ServerMetrics())
        asked = parse_request(ChatCompletionRequest, json.dumps(question("Six?", stream=True)).encode())
        free_at_the_end: list[int] = []

        async def never(message: Message) -> None:
            await asyncio.Event().wait()

        async def silent() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        async def play(tell: OnTurnUpdate) -> TurnResult:
            done = await desk.run_turn(asked, "", tell)
            assert isinstance(rollouts.sandbox, Counting)
            free_at_the_end.append(rollouts.sandbox.open)
            return done

        response = TurnResponse(play, ResponseBuilder(asked, "m"), stream=True, patience_s=0.5)
        await response({"type": "http"}, silent, never)
        assert free_at_the_end == [0], "the turn came to its end, though nobody took a word of it"
        await desk.conversations.wait_closed()

    asyncio.run(main())


class Dead(ScriptedEngine):
    """It died once too often."""

    def session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AbstractAsyncContextManager[EngineSession]:
        raise UnrecoverableError("engine", "dead", "correct it")


def test_a_body_that_does_not_come_is_given_up() -> None:
    async def main() -> None:
        said: list[Message] = []
        app = ServerApp(TurnService(scripted(), BOUNDS, ServerMetrics()), ApiKeys(), "m", None, patience_s=0.05)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"5")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        parts: asyncio.Queue[Message] = asyncio.Queue()
        parts.put_nowait({"type": "http.request", "body": b"{", "more_body": True})

        async def send(message: Message) -> None:
            said.append(message)

        await app.asgi(scope, parts.get, send)
        assert said[0]["status"] == 408

    asyncio.run(main())


@pytest.mark.heavy
@pytest.mark.alone
def test_a_client_that_goes_away_takes_the_process_of_its_console_along() -> None:
    """In the sandbox, in the middle of a line."""
    line = RENDERER.encode_as_sampled("print(sum(range(10**12)))\n")
    engine = ScriptedEngine.from_policy(lambda ids: line, forbidden_ids=RENDERER.forbidden_ids)

    @asynccontextmanager
    async def opener() -> AsyncIterator[Rollouts]:
        async with open_sandbox("local", warm=0) as sandbox:
            yield replace(scripted(), engine=engine, sandbox=sandbox)

    with opened(opener) as server:
        before = set(descendants(os.getpid()))
        chunks = iter(stream(server.client(), "Six?"))
        assert [next(chunks).choices[0].delta.content for _ in range(2)][1] == "print(sum(range(10**12)))\n"
        server.wait(lambda: set(descendants(os.getpid())) - before)
        consoles = set(descendants(os.getpid())) - before
        gone_s = time.monotonic()
        server.clients[0].close()
        server.wait(lambda: not {p for p in consoles if identity(p[0]) == p} and engine.open_sessions == 0)
        assert time.monotonic() - gone_s < FREED_S


def test_an_engine_that_died_for_good_ends_the_server_as_it_ends_a_run() -> None:
    dead = replace(scripted(), engine=Dead([[0]], forbidden_ids=RENDERER.forbidden_ids))
    with pytest.raises(UnrecoverableError) as ended, served(dead) as server:  # noqa: PT012 (it ends with the server)
        said = server.post(question("Six?"))
        assert said.status_code == 503
        assert said.json()["error"]["code"] == "broken_down"
    assert ended.value.exit_code == 3


def test_a_server_that_is_told_to_stop_lets_turns_end_and_closes_what_is_kept() -> None:
    stuck = Stuck()
    with served(scripted(stuck), drain_s=LIMIT_S) as server:
        server.thread.call_soon(stuck.may_go_on.set)
        ask(server.client(), "Six?", keep=True)
        server.thread.call_soon(stuck.may_go_on.clear)
        under_way = stream(server.client(), "Six?", keep=True)
        chunks = [next(iter(under_way))]
        server.stop()
        server.wait(lambda: server.sandbox.open == 1)
        server.thread.call_soon(stuck.may_go_on.set)
        chunks += list(under_way)
        assert (ours(chunks[-2])["answer"], ours(chunks[-2])["conversation"]) == ("6", None)


def test_a_turn_that_waits_for_a_place_when_the_server_stops_is_not_begun() -> None:
    stuck = Stuck()
    with served(scripted(stuck), replace(BOUNDS, max_concurrent=1), drain_s=LIMIT_S) as server:
        first, second = sent(server), sent(server, stream=True)
        server.wait(lambda: server.figure("repl_rl_waiting") == 1)
        server.stop()
        server.wait(lambda: httpx.get(f"{server.address}/health").status_code == 503)
        assert server.post(question("Six?")).status_code == 503
        server.thread.call_soon(stuck.may_go_on.set)
        answers = sorted(everything(each).split(b"\r\n")[0] for each in (first, second))
        assert answers == [b"HTTP/1.1 200 OK", b"HTTP/1.1 503 Service Unavailable"]


def test_a_turn_that_does_not_end_in_time_is_cut_and_told_so() -> None:
    stuck = Stuck()
    with served(scripted(stuck), drain_s=0.0) as server:
        connection = sent(server, stream=True)
        whole = sent(server)
        assert stuck.reached.wait(LIMIT_S)
        server.wait(lambda: server.engine.open_sessions == 2)
        server.stop()
        streamed, answered = everything(connection), everything(whole)
        assert b'"message": "the server is stopping"' in streamed
        assert b"data: [DONE]" in streamed
        assert answered.startswith(b"HTTP/1.1 503")


@pytest.mark.heavy
@pytest.mark.alone
@pytest.mark.parametrize(
    ("engine", "number"),
    [
        ("transformers", signal.SIGTERM),
        ("transformers", signal.SIGINT),
        ("transformers", signal.SIGUSR1),
        ("transformers", signal.SIGHUP),
        ("vllm", signal.SIGTERM),
    ],
)
def test_a_signal_ends_the_program_with_its_code_and_nothing_is_left(
    tmp_path: Path, engine: str, number: signal.Signals
) -> None:
    with program(tmp_path, "--engine", engine) as (process, address):
        with OpenAI(base_url=address, api_key="none", max_retries=0) as client:
            client.chat.completions.create(
                model="builtin:quickstart",
                messages=[{"role": "user", "content": "What is 2 + 2?"}],
                extra_body={"repl": {"keep": True}},
            )
        below = set(descendants(process.pid))
        assert below, "the consoles are processes"
        told_s = time.monotonic()
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - told_s < 10
        assert process.returncode == 128 + number
        assert b"repl-rl: interrupted" in errors
        assert b"Traceback" not in errors, errors
        wait_for(lambda: not {p for p in below if identity(p[0]) == p}, None)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/models")

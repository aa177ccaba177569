"""Clients that mean harm: the server answers or hangs up, holds nothing for them, and goes on answering others."""

import asyncio
import json
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import uvicorn
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from repl_rl.engine import ScriptedEngine
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.serve.http_server import LimitedConnection, compute_max_connections, raise_file_limit
from repl_rl.serve.openai_requests import ChatCompletionRequest, CompletionRequest
from tests.integration.serve.test_refusals import error
from tests.support.serve.http_server import LIMIT_S, MODEL, SENT_BYTES, Server, Stuck, ask, question, scripted, served
from tests.support.serve.raw_requests import everything, freed, request, sent

PATIENCE_S = 1
"""Of the servers here, so that nobody waits for long."""
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served() as server:
        yield server


def connected(server: Server, first: bytes = b"") -> socket.socket:
    """A connection, and what it sends."""
    connection = socket.create_connection(("127.0.0.1", port(server)), LIMIT_S)
    connection.sendall(first)
    return connection


def port(server: Server) -> int:
    found = urlsplit(server.address).port
    assert found is not None
    return found


def closed(connection: socket.socket) -> bool:
    """The server has hung up."""
    connection.setblocking(False)
    try:
        return not connection.recv(1 << 16)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def trickling(server: Server, connection: socket.socket, piece: bytes) -> None:
    """Send a little all the time, until the server hangs up."""

    def hung_up() -> bool:
        connection.setblocking(True)
        with suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(piece)
        return closed(connection)

    server.wait(hung_up)


def test_a_connection_that_does_not_come_to_its_request_is_hung_up_on() -> None:
    with served(patience_s=PATIENCE_S) as server, ExitStack() as stack:
        idle, begun, again, slow = (
            stack.enter_context(connected(server, first)) for first in (b"", HEALTH[:9], HEALTH, HEALTH[:-2])
        )
        assert again.recv(1 << 16).startswith(b"HTTP/1.1 200")
        again.sendall(HEALTH[:9])
        trickling(server, slow, b"X: y\r\n")
        for connection in (idle, begun, again):
            server.wait(partial(closed, connection))
        assert httpx.get(f"{server.address}/health").status_code == 200


def test_a_body_that_comes_byte_by_byte_is_given_up() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9999"
    with served(patience_s=PATIENCE_S) as server, connected(server, head + b"\r\n\r\n") as connection:
        said = bytearray()

        def answered() -> bool:
            connection.setblocking(True)
            connection.sendall(b" ")
            connection.setblocking(False)
            with suppress(BlockingIOError):
                said.extend(connection.recv(1 << 16))
            return bool(said)

        server.wait(answered)
        assert said.startswith(b"HTTP/1.1 408")
        trickling(server, connection, b" ")


@pytest.mark.heavy
@pytest.mark.alone
def test_a_second_request_before_the_answer_ends_the_first_and_its_connection() -> None:
    """Its client could leave unheard: nothing more is read of a connection on which a further request waits."""
    stuck = Stuck()
    with served(scripted(stuck)) as server, sent(server) as connection:
        assert stuck.reached.wait(LIMIT_S)
        server.wait(lambda: server.engine.open_sessions == server.sandbox.open == 1)
        sent_s = time.monotonic()
        connection.sendall(HEALTH)
        freed(server, sent_s)
        server.wait(lambda: closed(connection))


@pytest.mark.heavy
@pytest.mark.alone
def test_a_connection_that_is_closed_by_half_is_that_of_a_client_who_left() -> None:
    stuck = Stuck()
    with served(scripted(stuck)) as server, sent(server, stream=True) as connection:
        assert stuck.reached.wait(LIMIT_S)
        left_s = time.monotonic()
        connection.shutdown(socket.SHUT_WR)
        freed(server, left_s)
        everything(connection)
        assert server.figure("repl_rl_turns_abandoned_total") == 1


def test_a_reader_who_takes_nothing_is_left_behind_and_loses_its_connection() -> None:
    limits = RolloutLimits(max_line_tokens=200, max_lines=8, max_observation_tokens=20_000)
    with served(scripted(limits=limits), patience_s=PATIENCE_S) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SENT_BYTES)
        connection.connect(("127.0.0.1", port(server)))
        connection.sendall(request(question("Flood?", stream=True)))
        ends = ('repl_rl_turns_total{stop="max_lines"}', "repl_rl_turns_abandoned_total")  # as quick as it is
        server.wait(lambda: sum(map(server.figure, ends)) == 1)
        assert (server.engine.open_sessions, server.sandbox.open) == (0, 0)
        server.wait(lambda: connection.getsockname() not in peers(server))
        assert ask(server.client(), "Six?", show="answer").choices[0].message.content == "6"


def peers(server: Server) -> list[object]:
    """Whom the server has connections with."""
    found = psutil.Process().net_connections("tcp")
    return [tuple(each.raddr) for each in found if each.raddr and each.laddr.port == port(server)]


@pytest.mark.heavy
@pytest.mark.alone
def test_each_request_of_a_thousand_connections_is_answered_and_nothing_of_them_is_left() -> None:
    raise_file_limit()
    stuck, asked = Stuck(), request(question("Six?")).replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    refused, played = (f'repl_rl_requests_total{{path="/v1/chat/completions",status="{n}"}}' for n in (429, 200))
    with served(scripted(stuck)) as server:
        with ExitStack() as stack:
            for _ in range(600):
                stack.enter_context(connected(server))
            asking = [stack.enter_context(connected(server, asked)) for _ in range(400)]
            server.wait(lambda: server.figure(refused) == 396)
            assert httpx.get(f"{server.address}/health").status_code == 200
            server.thread.call_soon(stuck.may_go_on.set)
            server.wait(lambda: server.figure(played) == 4)
            answers = [everything(connection) for connection in asking]
        assert sum(b"HTTP/1.1 200 OK" in answer for answer in answers) == 4
        assert all(b"retry-after: " in answer for answer in answers if b"HTTP/1.1 200 OK" not in answer)
        server.wait(lambda: not peers(server))


def test_more_connections_than_there_is_room_for_are_hung_up_on() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("nothing was asked")

    async def main() -> None:
        config, state = uvicorn.Config(app, http=LimitedConnection, log_config=None), ServerState()
        others = [LimitedConnection(config, state, {}) for _ in range(compute_max_connections())]
        state.connections.update(others)
        async with AsyncExitStack() as stack:
            listening = await asyncio.get_running_loop().create_server(
                lambda: LimitedConnection(config, state, {}), "127.0.0.1", 0
            )
            await stack.enter_async_context(listening)
            address = listening.sockets[0].getsockname()
            reader, writer = await asyncio.open_connection(*address)
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
            writer.close()

    asyncio.run(main())


def test_the_server_opens_as_many_files_as_it_may_and_leaves_half_to_consoles_and_engine() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(before[1], 1 << 16)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most - 2, before[1]))
    try:
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, before[1])
        assert compute_max_connections() == most // 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    "head",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 66_000,
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
    ids=["tls", "no host", "long head", "negative length", "two lengths"],
)
def test_what_is_no_http_is_refused(server: Server, head: bytes) -> None:
    with connected(server) as connection:
        with suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(head)
        assert everything(connection).startswith(b"HTTP/1.1 400")
    assert httpx.get(f"{server.address}/health").status_code == 200


def test_a_body_with_many_mistakes_is_read_as_far_as_the_first_one() -> None:
    """Finding them all in the longest body took the server half a minute, in which nobody was answered."""
    many: tuple[tuple[type[ChatCompletionRequest] | type[CompletionRequest], dict[str, object]], ...] = (
        (ChatCompletionRequest, {"model": MODEL, "messages": [1] * 1000}),
        (ChatCompletionRequest, {"model": MODEL, "messages": [{"role": "user", "content": [1] * 1000}]}),
        (CompletionRequest, {"model": MODEL, "prompt": [-1] * 1000}),
        (CompletionRequest, {"model": MODEL, "prompt": "", "stop": [1] * 1000}),
    )
    for kind, said in many:
        with pytest.raises(ValidationError) as refused:
            kind.model_validate(said)
        assert refused.value.error_count() <= 3, "one of each way to read it"


def test_a_text_that_cannot_fit_is_refused_before_its_ids_are_looked_for(server: Server) -> None:
    rollouts = scripted()
    assert isinstance(rollouts.engine, ScriptedEngine)
    rollouts.engine.context_tokens = 64
    with served(rollouts) as small:
        for path, said in (
            ("chat/completions", question("x" * 500_000)),
            ("completions", {"model": MODEL, "prompt": "x" * 500_000}),
        ):
            found = error(small.post(said, path), 400)
            assert (found["code"], "500000 characters" in str(found["message"])) == ("context_length_exceeded", True)
            assert found["param"] == ("prompt" if path == "completions" else "messages")
        found = error(small.post({"model": MODEL, "prompt": [5] * 300_000}, "completions"), 400)
        assert "300000 tokens" in str(found["message"])


@pytest.mark.parametrize("depth", [90, 900, 990, 100_000])
@pytest.mark.parametrize("name", ["made_up", "tools", "messages", "repl"])
@pytest.mark.parametrize(("opens", "ends"), [("[", "]"), ('{"a":', "1}")])
def test_deep_json_is_refused(server: Server, depth: int, name: str, opens: str, ends: str) -> None:
    deep = opens * depth + ends[:-1] + ends[-1] * depth
    body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Six?"}}], "{name}": {deep}}}'
    headers = {"Content-Type": "application/json"}
    found = error(httpx.post(f"{server.address}/v1/chat/completions", content=body, headers=headers), 400)
    assert len(str(found["message"])) < 300


def test_names_that_are_no_text_or_without_end_are_refused_in_the_usual_shape(server: Server) -> None:
    for name in ("\ud800", "k" * 900_000):
        found = error(server.post(question("Six?", **{name: 1})), 400)
        assert found["code"] == "unsupported_parameter"
        assert len(str(found)) < 400
    error(server.post(question("Six?", repl={"\ud800": 1})), 400)
    error(server.post(question("Six?", repl={"k" * 900_000: 1})), 400)
    error(server.post({**question("Six?"), "model": "\ud800"}), 404)
    error(server.post(question("Six?", repl={"conversation": "\ud800"})), 404)
    assert json.loads(server.post(question("Six?", stop="\ud800")).text)["repl"]["answer"] == "6"

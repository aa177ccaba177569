"""Servers for tests: a scripted policy behind the real server, on a port of its own."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field, replace

import httpx
from openai import OpenAI, Stream
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from repl_rl.engine import ScriptedEngine
from repl_rl.rollout import ReplSampler, Rollouts
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.synchronous_rollouts import EventLoopThread, OpenRollouts
from repl_rl.sandbox import InProcessSandbox
from repl_rl.sandbox.inprocess import InProcessSession
from repl_rl.serve.auth import ApiKeys
from repl_rl.serve.conversation_service import ServerLimits
from repl_rl.serve.http_errors import PATIENCE_S
from repl_rl.serve.http_server import TurnServer, open_listening_socket
from tests.support.processes import wait_for
from tests.support.scripted_rollouts import RENDERER, world

MODEL = "scripted"
LIMIT_S = 20.0
SENT_BYTES = 8192
"""That the system holds for a reader who takes nothing."""
BOUNDS = ServerLimits(max_concurrent=2, max_waiting=2, max_conversations=4, conversation_timeout_s=600.0)
ANSWERS: Mapping[str, Sequence[str]] = {
    "Six?": ["x = 6\n", "x\n", "submit_final_answer(x)\n"],
    "Times seven?": ["submit_final_answer(x * 7)\n"],
    "Is x there?": ["submit_final_answer('x' in globals())\n"],
    "Fail?": ["1/0\n", "print('>>> ')\n", "submit_final_answer('it did')\n"],
    "Never?": ["pass\n"] * 50,
    "Leave?": ["exit()\n"],
    "Flood?": ["print('a' * 9000)\n"] * 50,
    "Steer?": ["print('\\x1b[2J[bold]')\n", "submit_final_answer('\\x1b[0m')\n"],
    "<b>Hostile</b>?": ["print('</script><img src=x onerror=alert(1)>')\n", "submit_final_answer('<i>no</i>')\n"],
}
"""What the policy writes when it is asked; it starts anew at each question."""


def writing(answers: Mapping[str, Sequence[str]]) -> Callable[[Sequence[int]], Sequence[int]]:
    """A policy that writes the next line of the answer to the newest question."""

    def policy(ids: Sequence[int]) -> Sequence[int]:
        text = RENDERER.decode(ids)
        at, question = max((text.rfind(question), question) for question in answers)
        since = text[at + len(question) :]
        lines = answers[question]
        done = sum(since.count(f">>> {line}") for line in dict.fromkeys(lines))
        return RENDERER.encode_as_sampled(lines[min(done, len(lines) - 1)])

    return policy


class Counting(InProcessSandbox):
    """It knows how many of its consoles are open."""

    open = 0

    @asynccontextmanager
    async def session(self) -> AsyncIterator[InProcessSession]:
        self.open += 1
        try:
            async with super().session() as session:
                yield session
        finally:
            self.open -= 1


class Stuck(ReplSampler):
    """It runs a line, then waits until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = asyncio.Event()
        self.reached = threading.Event()

    async def rollout(self, episode: Episode) -> None:
        await episode.push(await episode.sample())
        self.reached.set()
        await self.may_go_on.wait()
        await super().rollout(episode)


@dataclass
class Server:
    """A server that runs."""

    address: str
    thread: EventLoopThread
    keys: Sequence[str] = ()
    clients: list[OpenAI] = field(default_factory=list)
    engine: ScriptedEngine = field(default_factory=lambda: ScriptedEngine([[0]]))
    sandbox: Counting = field(default_factory=lambda: Counting())
    stop: Callable[[], None] = lambda: None
    """As SIGTERM does."""

    def client(self, key: str = "") -> OpenAI:
        """A client of OpenAI's, which never tries again."""
        api_key = key or (self.keys[0] if self.keys else "none")
        client = OpenAI(base_url=f"{self.address}/v1", api_key=api_key, max_retries=0, timeout=LIMIT_S)
        self.clients.append(client)
        return client

    def post(self, said: Mapping[str, object], path: str = "chat/completions", key: str = "") -> httpx.Response:
        """A plain request."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        return httpx.post(f"{self.address}/v1/{path}", content=json.dumps(said), headers=headers, timeout=LIMIT_S)

    def figure(self, name: str) -> float:
        """One of /metrics; of those with a label, 0 before there is one."""
        key = {"Authorization": f"Bearer {self.keys[0]}"} if self.keys else {}
        text = httpx.get(f"{self.address}/metrics", headers=key).text
        found = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        assert len(found) == 1 or (not found and "{" in name)
        return float(found[0].rpartition(" ")[2]) if found else 0.0

    def wait(self, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        """Until it is true."""
        wait_for(condition, None, limit_s)


def question(text: str, **more: object) -> dict[str, object]:
    """A request of /v1/chat/completions."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


def ours(answer: ChatCompletion | ChatCompletionChunk) -> dict[str, object]:
    """What stands in its field `repl`; {}: there is none."""
    found = (answer.model_extra or {}).get("repl", {})
    assert isinstance(found, dict)
    return found


def ask(client: OpenAI, text: str, **repl: object) -> ChatCompletion:
    """A whole answer."""
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text}], extra_body={"repl": repl}
    )


def stream(client: OpenAI, text: str, **repl: object) -> Stream[ChatCompletionChunk]:
    """An answer as it comes."""
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"repl": repl},
    )


def scripted(
    sampler: ReplSampler | None = None,
    limits: RolloutLimits | None = None,
    answers: Mapping[str, Sequence[str]] = ANSWERS,
) -> Rollouts:
    """Rollouts of the policy above, in consoles that are counted."""
    engine = ScriptedEngine.from_policy(writing(answers), forbidden_ids=RENDERER.forbidden_ids)
    return replace(world([], sampler, limits), engine=engine, sandbox=Counting())


@contextmanager
def opened(
    opener: OpenRollouts,
    bounds: ServerLimits = BOUNDS,
    keys: Sequence[str] = (),
    drain_s: float = 0.0,
    name: str = MODEL,
    patience_s: int = PATIENCE_S,
) -> Iterator[Server]:
    """A server of whatever rollouts."""
    found = open_listening_socket("127.0.0.1", 0, patience_s)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENT_BYTES)  # of its connections, too
    address = f"http://127.0.0.1:{found.getsockname()[1]}"
    ready = threading.Event()
    with closing(EventLoopThread()) as thread:
        serving = TurnServer(opener, found, name, bounds, ApiKeys(keys), drain_s, patience_s)
        running = thread.start_detached(serving.run(ready.set))
        server = Server(address, thread, keys, stop=lambda: thread.call_soon(serving.stop))
        try:
            while not ready.wait(0.05):
                assert not running.done(), running.exception()
            yield server
        finally:
            for client in server.clients:
                client.close()
            server.stop()
            running.result(LIMIT_S)


@contextmanager
def served(
    rollouts: Rollouts | None = None,
    bounds: ServerLimits = BOUNDS,
    keys: Sequence[str] = (),
    drain_s: float = 0.0,
    patience_s: int = PATIENCE_S,
) -> Iterator[Server]:
    """A server of the scripted policy; afterwards nothing of it may be left."""
    played = rollouts or scripted()
    engine, sandbox = played.engine, played.sandbox
    assert isinstance(engine, ScriptedEngine)
    assert isinstance(sandbox, Counting)

    @asynccontextmanager
    async def opener() -> AsyncIterator[Rollouts]:
        yield played

    with opened(opener, bounds, keys, drain_s, patience_s=patience_s) as server:
        server.engine, server.sandbox = engine, sandbox
        yield server
    assert engine.open_sessions == 0
    assert sandbox.open == 0

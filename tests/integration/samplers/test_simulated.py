"""A model as the person whom the policy talks to: over HTTP, or in an engine of its own."""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.samplers.retry_with_feedback_sampler import (
    Exchange,
    Feedback,
    FeedbackSampler,
    RemoteUserModel,
    SimulatedUser,
    UserEngine,
    UserTurnRequest,
)
from repl_rl.trajectory.trajectory import FailureKind, Observed, Trajectory
from repl_rl.utils.package_data import find_asset
from tests.support.samplers.marked_text import chat_renderer, rollouts_of, written
from tests.support.scripted_rollouts import TASK


@dataclass
class Server:
    """An OpenAI-compatible server that plays a list of answers: a text, or a status to fail with."""

    answers: Sequence[str | int | bytes]
    asked: list[Mapping[str, object]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    address: str = ""

    @contextmanager
    def running(self) -> Iterator["Server"]:
        ours = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/chat/completions"
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = ours.answers[min(len(ours.asked), len(ours.answers) - 1)]
                ours.asked.append(asked)
                ours.keys.append(self.headers.get("Authorization"))
                body = answer if isinstance(answer, bytes) else b"failed"
                if isinstance(answer, str):
                    choice = {"message": {"role": "assistant", "content": answer}}
                    body = json.dumps({"choices": [choice]}).encode()
                self.send_response(answer if isinstance(answer, int) else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            self.address = f"http://127.0.0.1:{server.server_port}/v1"
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


def play(sampler: FeedbackSampler, *turns: str) -> Trajectory:
    renderer = chat_renderer()
    script = written(renderer, "".join(f"{turn}<|im_end|>" for turn in turns))

    async def one() -> Trajectory:
        async with sampler.open_resources():
            (t,) = await rollouts_of(sampler, [script], renderer).collect([TASK])
            return t

    return asyncio.run(one())


def shown(t: Trajectory) -> list[str]:
    return [segment.text for segment in t.segments if isinstance(segment, Observed)]


def test_a_model_at_an_address_says_the_words_and_the_judge_decides() -> None:
    with Server(["Are you sure?", "Still no."]).running() as server:
        sampler = FeedbackSampler(user=server.address, user_model="small", user_tokens=32)
        t = play(sampler, "\\boxed{40}", "\\boxed{41}", "\\boxed{42}")
    assert ["Are you sure?" in shown(t)[0], "Still no." in shown(t)[1]] == [True, True]
    assert (t.outcome, [r.value for line in t.lines for r in line.rewards]) == (1.0, [0.0, 0.0, 1.0])
    first, second = server.asked
    assert (first["model"], first["max_tokens"]) == ("small", 32)
    assert first["seed"] != second["seed"]
    roles = [[m["role"] for m in asked["messages"]] for asked in server.asked if isinstance(asked["messages"], list)]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]


def test_the_reference_answer_is_not_told_to_the_user_and_no_key_is_sent_unasked() -> None:
    with Server(["No."]).running() as server:
        play(FeedbackSampler(user=server.address, max_assistant_turns=2), "\\boxed{40}", "\\boxed{41}")
    said = json.dumps(server.asked)
    assert TASK.question in said
    assert TASK.answer not in said.replace(TASK.question, "")
    assert server.keys == [None]


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_A_TEST", "secret")
    with Server(["No."]).running() as server:
        play(FeedbackSampler(user=server.address, user_key="KEY_OF_A_TEST", max_assistant_turns=2), "a", "b")
    assert server.keys == ["Bearer secret"]


@pytest.mark.parametrize("failing", [[503, 429], [500]])
def test_a_request_that_may_go_better_is_repeated(failing: list[int]) -> None:
    with Server([*failing, "Yes?"]).running() as server:
        voice = RemoteUserModel(server.address, retry_delay_s=0.0)
        assert asyncio.run(voice.generate_reply(UserTurnRequest([{"role": "user", "content": "?"}], 8, 0))) == "Yes?"
    assert len(server.asked) == len(failing) + 1


@pytest.mark.parametrize(
    ("answers", "told", "requests"),
    [
        ([500], "did not answer 3 requests: status 500: failed", 3),
        ([400], "refuses the request, status 400: failed", 1),
        ([b"<html>"], "it is not a chat completion", 1),
        ([b'{"choices": []}'], "it is not a chat completion", 1),
    ],
)
def test_an_address_that_does_not_answer_drops_the_rollout(
    answers: list[int | bytes], told: str, requests: int
) -> None:
    with Server(answers).running() as server:
        voice = RemoteUserModel(server.address, retry_delay_s=0.0)
        with pytest.raises(UserCodeError, match=told):
            asyncio.run(SimulatedUser(voice).generate_reply("r", TASK, ["a"], [], ""))
        assert len(server.asked) == requests


def test_a_user_that_fails_is_an_error_of_the_user_and_others_go_on() -> None:
    with Server([400]).running() as server:
        sampler = FeedbackSampler(user=server.address)
        renderer = chat_renderer()
        right, wrong = (written(renderer, f"\\boxed{{{n}}}<|im_end|>") for n in (42, 41))
        found = asyncio.run(rollouts_of(sampler, [right, right, right, wrong], renderer).collect([TASK] * 24))
    dropped = [t for t in found if t.failure is not None]
    assert dropped
    assert {t.failure.kind for t in dropped if t.failure} == {FailureKind.USER_ERROR}
    assert {t.outcome for t in found if t.failure is None} == {1.0}


def test_what_a_function_says_of_the_turn_is_told_to_the_model() -> None:
    def strict(exchange: Exchange) -> Feedback:
        return Feedback("it is too small", reward=-0.5)

    with Server(["Higher!"]).running() as server:
        sampler = FeedbackSampler(strict, user=server.address, max_assistant_turns=2)
        t = play(sampler, "\\boxed{40}", "\\boxed{41}")
    assert "You know: it is too small" in json.dumps(server.asked)
    assert "Higher!" in shown(t)[0]
    assert "too small" not in shown(t)[0]
    assert [r.value for line in t.lines for r in line.rewards] == [-0.5, -0.5]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: FeedbackSampler(user="gpt"), "user is 'gpt'; give model:FOLDER, or the http"),
        (lambda: FeedbackSampler(user="model:/no/such/folder"), "there is no model"),
        (lambda: FeedbackSampler(user="http://x/v1", user_engine="vllm"), "the server chooses its own engine"),
        (lambda: FeedbackSampler(user="http://x/v1", user_key="NO_SUCH_VARIABLE"), "name an environment variable"),
        (lambda: FeedbackSampler(user_system="Be kind."), "have no effect without one"),
        (lambda: FeedbackSampler(user="http://x/v1", user_tokens=0), "user_tokens is 0; give at least 1"),
    ],
)
def test_a_user_that_cannot_be_is_refused_when_the_sampler_is_made(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make()


@pytest.mark.heavy
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_another_model_folder_says_the_words(engine: UserEngine, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("user") / "model"
    shutil.copytree(find_asset("policies/quickstart"), folder)
    (folder / "chat_template.jinja").write_text(str(chat_renderer().tokenizer.chat_template))
    assert Renderer.from_folder(folder, "carry").chat_template.exists
    sampler = FeedbackSampler(user=f"model:{folder}", user_tokens=6, user_engine=engine, max_assistant_turns=3)
    one = play(sampler, "\\boxed{40}", "\\boxed{41}", "\\boxed{41}")
    assert (len(shown(one)), one.failure) == (2, None)
    if engine == "transformers":  # vLLM seeds no session
        assert shown(one) == shown(play(sampler, "\\boxed{40}", "\\boxed{41}", "\\boxed{41}"))
    with pytest.raises(UserCodeError, match=r"enter `async with sampler.opened\(\)` first"):
        asyncio.run(rollouts_of(sampler, [written(chat_renderer(), "a<|im_end|>")], chat_renderer()).collect([TASK]))

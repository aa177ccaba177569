"""The server as OpenAI's own client sees it: whole answers, streams, lines, and the ids of training."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from repl_rl.rollout import SyncRollouts
from repl_rl.rollout_config import RolloutConfig
from repl_rl.serve.http_server import open_listening_socket
from repl_rl.tasks import Split
from tests.support.scripted_rollouts import RENDERER
from tests.support.serve.http_server import (
    BOUNDS,
    MODEL,
    Server,
    Stuck,
    ask,
    opened,
    ours,
    question,
    scripted,
    served,
    stream,
)

TRANSCRIPT = "x = 6\n>>> x\n6\n>>> submit_final_answer(x)\n"
LINES = [("x = 6", "", "ok"), ("x", "6\n", "ok"), ("submit_final_answer(x)", "", "answered")]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served() as server:
        yield server


def told(lines: object) -> list[tuple[object, object, object]]:
    assert isinstance(lines, list)
    assert all(line["ms"] >= 0 and line["cut"] is False for line in lines)
    return [(line["source"], line["output"], line["status"]) for line in lines]


def test_a_line_does_not_wait_until_the_client_has_acknowledged_the_one_before() -> None:
    with open_listening_socket("127.0.0.1", 0) as door, socket.create_connection(door.getsockname()):
        accepted, _ = door.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_a_whole_answer_is_the_transcript_with_its_lines_beside_it(server: Server) -> None:
    answer = ask(server.client(), "Six?")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TRANSCRIPT, "stop")
    said = ours(answer)
    assert told(said["lines"]) == LINES
    assert (said["answer"], said["stop"], said["conversation"]) == ("6", "answered", None)


def test_what_was_sampled_and_what_was_read_are_counted_apart(server: Server) -> None:
    answer = ask(server.client(), "Six?", tokens=True)
    said = ours(answer)
    prompt, completion, sampled = (said[name] for name in ("prompt_token_ids", "completion_token_ids", "sampled"))
    assert isinstance(prompt, list)
    assert isinstance(completion, list)
    assert isinstance(sampled, list)
    assert RENDERER.decode(prompt) == "Six?\n>>> "
    assert RENDERER.decode(completion) == TRANSCRIPT
    written = [token for token, by_policy in zip(completion, sampled, strict=True) if by_policy]
    assert RENDERER.decode(written) == "x = 6\nx\nsubmit_final_answer(x)\n"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(written)
    assert answer.usage.prompt_tokens == len(prompt) + len(completion) - len(written)
    assert answer.usage.total_tokens == len(prompt) + len(completion)


def test_the_answer_alone_is_the_text_where_it_is_asked_for(server: Server) -> None:
    answer = ask(server.client(), "Six?", show="answer")
    assert answer.choices[0].message.content == "6"
    assert told(ours(answer)["lines"]) == LINES
    unanswered = ask(server.client(), "Leave?", show="answer")
    assert unanswered.choices[0].message.content is None


def test_a_stream_is_the_same_answer_piece_by_piece(server: Server) -> None:
    chunks = list(stream(server.client(), "Six?"))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == TRANSCRIPT
    assert told([line for chunk in chunks if (line := ours(chunk).get("line"))]) == LINES
    *_, last, usage = chunks
    assert last.choices[0].finish_reason == "stop"
    assert (ours(last)["answer"], ours(last)["stop"]) == ("6", "answered")
    assert usage.choices == []
    assert usage.usage == ask(server.client(), "Six?").usage


def test_a_stream_of_the_answer_alone_tells_lines_beside_it(server: Server) -> None:
    chunks = list(stream(server.client(), "Six?", show="answer"))
    assert [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content] == [
        "6"
    ]
    assert told([line for chunk in chunks if (line := ours(chunk).get("line"))]) == LINES


def test_a_line_is_told_before_the_next_one_is_written() -> None:
    """The policy is held after its first line, whose text and output the client has by then."""
    stuck = Stuck()
    with served(scripted(stuck)) as server:
        chunks = iter(stream(server.client(), "Six?"))
        seen = [next(chunks) for _ in range(3)]
        assert told([ours(seen[2])["line"]]) == LINES[:1]
        server.thread.call_soon(stuck.may_go_on.set)
        rest = list(chunks)
        assert "".join(c.choices[0].delta.content or "" for c in [*seen, *rest] if c.choices) == TRANSCRIPT


def test_errors_of_lines_have_their_status_and_a_printed_prompt_is_output(server: Server) -> None:
    lines = told(ours(ask(server.client(), "Fail?"))["lines"])
    assert [status for _, _, status in lines] == ["exception", "ok", "answered"]
    assert "ZeroDivisionError" in str(lines[0][1])
    assert lines[1][1] == ">>> \n"


def test_a_limit_ends_an_answer_as_openai_says_it(server: Server) -> None:
    assert ask(server.client(), "Never?").choices[0].finish_reason == "length"
    assert ask(server.client(), "Leave?").choices[0].finish_reason == "stop"
    short = server.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Six?"}], max_tokens=3
    )
    assert short.choices[0].finish_reason == "length"
    assert short.usage is not None
    assert short.usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("stop", "text", "ran"),
    [
        ("submit", "x = 6\n>>> x\n6\n>>> ", 2),
        (["nowhere", "final", "submit_"], "x = 6\n>>> x\n6\n>>> ", 2),
        ("\n", "x = 6", 0),
        ("_answer", "x = 6\n>>> x\n6\n>>> submit_final", 2),
        (">>>", TRANSCRIPT, 3),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_text_that_ends_the_turn_is_not_told_and_its_line_does_not_run(
    server: Server, stop: str | list[str], text: str, ran: int, streamed: bool
) -> None:
    if streamed:
        events = server.post(question("Six?", stop=stop, stream=True)).text.split("\n\n")[:-2]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        lines = [chunk["repl"]["line"] for chunk in chunks if "line" in chunk.get("repl", {})]
        end = chunks[-1]["choices"][0]["finish_reason"]
    else:
        answer = server.post(question("Six?", stop=stop)).json()
        said, lines = answer["choices"][0]["message"]["content"], answer["repl"]["lines"]
        end = answer["choices"][0]["finish_reason"]
    assert (said, end) == (text, "stop")
    assert len([line for line in lines if line["status"] is not None]) == ran
    assert "".join(line["source"] for line in lines if line["status"] is None) in text


def test_plain_completions_go_on_from_the_text_or_the_ids_that_are_given(server: Server) -> None:
    client = server.client()
    prompt = "Six?\n>>> "
    by_text = client.completions.create(model=MODEL, prompt=prompt)
    by_ids = client.completions.create(model=MODEL, prompt=list(RENDERER.encode(prompt)))
    assert by_text.choices[0].text == by_ids.choices[0].text == TRANSCRIPT
    begun = client.completions.create(model=MODEL, prompt=f"{prompt}x = 6\n>>> x = 5\n>>> ")
    assert (begun.model_extra or {})["repl"]["lines"][0]["status"] == "exception", "its console starts empty"
    chunks = list(client.completions.create(model=MODEL, prompt=prompt, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TRANSCRIPT
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_many_at_once_have_their_own_answers() -> None:
    asked = {"Six?": "6", "Is x there?": "False", "Fail?": "it did"}
    with served(bounds=replace(BOUNDS, max_waiting=24)) as server, ThreadPoolExecutor(8) as pool:
        wanted = list(asked) * 8
        answers = pool.map(lambda text: server.post(question(text, repl={"show": "answer"})).json(), wanted)
        assert [said["choices"][0]["message"]["content"] for said in answers] == [asked[text] for text in wanted]


def test_the_model_is_listed_under_its_name(server: Server) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_stream_ends_with_the_word_that_clients_wait_for(server: Server) -> None:
    said = server.post(question("Six?", stream=True))
    assert said.headers["content-type"].startswith("text/event-stream")
    *events, last, rest = said.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events)


def test_health_and_figures_are_told(server: Server) -> None:
    assert httpx.get(f"{server.address}/health").json() == {"status": "ok"}
    before = server.figure("repl_rl_sampled_tokens_total")
    answer = ask(server.client(), "Six?")
    assert answer.usage is not None
    assert server.figure("repl_rl_sampled_tokens_total") - before == answer.usage.completion_tokens
    assert server.figure('repl_rl_turns_total{stop="answered"}') >= 1
    assert server.figure('repl_rl_lines_total{status="answered"}') >= 1
    assert server.figure("repl_rl_running") == 0


@pytest.mark.parametrize(
    ("engine", "count"),
    [
        ("transformers", 6),
        pytest.param("transformers", 100, marks=pytest.mark.heavy),
        pytest.param("vllm", 100, marks=pytest.mark.heavy),
    ],
)
def test_a_served_rollout_is_the_greedy_one_of_an_evaluation_id_by_id(engine: str, count: int) -> None:
    """The bundled policy, in consoles of the sandbox: what `repl-rl eval` plays, and what clients are answered."""
    world = RolloutConfig(engine=engine, concurrency=2)
    tasks = world.draw_tasks(Split.HELD_OUT, count)
    with SyncRollouts(world.open_rollouts, {task.id: task for task in tasks}) as source:
        evaluated = source.sample(tasks, 0.0)
    with opened(world.open_rollouts) as server:
        for task, played in zip(tasks, evaluated, strict=True):
            answer = server.post(question(task.question, temperature=0, repl={"tokens": True})).json()["repl"]
            assert tuple(answer["prompt_token_ids"]) == played.prompt.token_ids
            assert tuple(answer["completion_token_ids"]) == played.completion_ids
            assert tuple(answer["sampled"]) == played.loss_mask
            assert (answer["answer"], answer["stop"]) == (played.answer, str(played.stop))
    assert len(evaluated) == count
    assert any(len(played.lines) > 1 for played in evaluated)

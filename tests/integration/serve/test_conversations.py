"""A console that lives as long as its conversation: whose it is, how it is gone on with, and when it ends."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import openai
import pytest

from repl_rl.rollout import Rollouts
from repl_rl.samplers.retry_with_feedback_sampler import FeedbackSampler
from repl_rl.sandbox import open_sandbox
from repl_rl.serve.conversation_service import ServerLimits
from tests.integration.serve.test_refusals import KEYS, error
from tests.support.processes import wait_for
from tests.support.scripted_rollouts import RENDERER
from tests.support.serve.http_server import BOUNDS, MODEL, Stuck, ask, opened, ours, question, scripted, served, stream


def test_names_of_the_first_turn_are_there_in_the_second() -> None:
    with served() as server:
        client = server.client()
        first = ask(client, "Six?", keep=True, show="answer")
        id = ours(first)["conversation"]
        assert isinstance(id, str)
        assert len(id) >= 32
        second = ask(client, "Times seven?", conversation=id, show="answer", tokens=True)
        assert second.choices[0].message.content == "42"
        assert ours(second)["conversation"] == id
        assert server.sandbox.open == 1


def test_nobody_elses_console_and_no_other_conversations_is_reached() -> None:
    with served(keys=KEYS) as server:
        client, other = (server.client(key) for key in KEYS)
        id = ours(ask(client, "Six?", keep=True))["conversation"]
        with pytest.raises(openai.NotFoundError) as refused:
            ask(other, "Is x there?", conversation=id)
        with pytest.raises(openai.NotFoundError) as unknown:
            ask(other, "Is x there?", conversation=f"{id}x")
        assert str(refused.value) == str(unknown.value), "nobody learns that it is there"
        assert server_delete(server.address, str(id), KEYS[1]) == 404
        alone = ours(ask(client, "Six?", keep=True))["conversation"]
        assert alone != id
        fresh = ask(client, "Is x there?", keep=True, show="answer")
        assert fresh.choices[0].message.content == "False"


def server_delete(address: str, id: str, key: str = "") -> int:
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.delete(f"{address}/v1/conversations/{id}", headers=headers).status_code


SEEKS = {
    "Hide?": [
        "secret = 'of the first'\n",
        "_ = open('/tmp/secret', 'w').write(secret)\n",
        "import os, socket\n",
        "door = socket.socket(socket.AF_UNIX); door.bind('\\0secret'); door.listen()\n",
        "submit_final_answer(secret)\n",
    ],
    "Seek?": [
        "import os, socket\n",
        "names = 'secret' in globals() or os.path.exists('/tmp/secret')\n",
        "others = [p for p in os.listdir('/proc') if p.isdigit() and int(p) > os.getpid()]\n",
        "socket.socket(socket.AF_UNIX).connect('\\0secret')\n",
        "socket.create_connection(('127.0.0.1', PORT), 5)\n",
        "os.kill(-1, 9)\n",
        "submit_final_answer((names, others))\n",
    ],
    "Still there?": ["submit_final_answer(secret)\n"],
}
"""What one conversation leaves in its console, and how another looks for it, for the console and for the server."""


@pytest.mark.heavy
def test_a_conversation_reaches_neither_anothers_console_nor_the_server() -> None:
    """In the sandbox."""
    answers = {asked: list(lines) for asked, lines in SEEKS.items()}

    @asynccontextmanager
    async def opener() -> AsyncIterator[Rollouts]:
        async with open_sandbox("local", warm=2) as sandbox:
            yield replace(scripted(answers=answers), sandbox=sandbox)

    with opened(opener) as server:
        answers["Seek?"] = [line.replace("PORT", server.address.rpartition(":")[2]) for line in SEEKS["Seek?"]]
        hidden = ours(ask(server.client(), "Hide?", keep=True))
        assert isinstance(hidden["lines"], list)
        assert [line["status"] for line in hidden["lines"]] == ["ok"] * 4 + ["answered"], hidden
        sought = ours(ask(server.client(), "Seek?", keep=True))
        lines = sought["lines"]
        assert isinstance(lines, list)
        assert [line["status"] for line in lines[3:5]] == ["exception", "exception"], lines
        assert sought["answer"] == "(False, [])"
        assert (
            ours(ask(server.client(), "Still there?", conversation=hidden["conversation"]))["answer"] == "of the first"
        )


def test_a_conversation_is_ended_by_whoever_has_it_and_its_console_with_it() -> None:
    with served() as server:
        id = str(ours(ask(server.client(), "Six?", keep=True))["conversation"])
        assert server.sandbox.open == 1
        assert server_delete(server.address, id) == 204
        server.wait(lambda: server.sandbox.open == 0)
        assert server_delete(server.address, id) == 404
        with pytest.raises(openai.NotFoundError):
            ask(server.client(), "Times seven?", conversation=id)


def test_a_turn_that_is_not_to_be_kept_is_the_last_one() -> None:
    with served() as server:
        client = server.client()
        id = ours(ask(client, "Six?", keep=True))["conversation"]
        last = ask(client, "Times seven?", conversation=id, keep=False)
        assert (ours(last)["answer"], ours(last)["conversation"]) == ("42", None)
        server.wait(lambda: server.sandbox.open == 0)


def test_what_is_not_asked_to_be_kept_holds_no_console() -> None:
    with served() as server:
        assert ours(ask(server.client(), "Six?"))["conversation"] is None
        server.wait(lambda: server.sandbox.open == 0)


def test_a_console_that_ended_is_no_conversation_any_more() -> None:
    with served() as server:
        assert ours(ask(server.client(), "Leave?", keep=True))["conversation"] is None
        server.wait(lambda: server.sandbox.open == 0)


def test_a_conversation_without_a_turn_ends_by_itself() -> None:
    with served(bounds=replace(BOUNDS, conversation_timeout_s=0.05)) as server:
        id = ours(ask(server.client(), "Six?", keep=True))["conversation"]
        wait_for(lambda: server.figure("repl_rl_conversations") == 0, None, 20)
        server.wait(lambda: server.sandbox.open == 0)
        with pytest.raises(openai.NotFoundError):
            ask(server.client(), "Times seven?", conversation=id)


def test_no_more_conversations_are_kept_than_may_be() -> None:
    with served(bounds=replace(BOUNDS, max_conversations=1, conversation_timeout_s=30)) as server:
        id = ours(ask(server.client(), "Six?", keep=True))["conversation"]
        said = server.post(question("Six?", repl={"keep": True}))
        assert error(said, 429)["code"] == "too_many_conversations"
        assert 20 <= int(said.headers["retry-after"]) <= 30
        assert server.post(question("Six?")).status_code == 200, "nothing is kept of it"
        assert ours(ask(server.client(), "Times seven?", conversation=id))["answer"] == "42"


def test_what_was_said_may_be_told_again_but_not_otherwise() -> None:
    with served() as server:
        first = ask(server.client(), "Six?", keep=True)
        id, said = ours(first)["conversation"], first.choices[0].message.content
        history = [{"role": "user", "content": "Six?"}, {"role": "assistant", "content": said}]
        more = {"role": "user", "content": "Times seven?"}
        altered = [history[0], {"role": "assistant", "content": "x = 7\n"}, more]
        asked = {"model": MODEL, "repl": {"conversation": id}}
        assert "not those of this conversation" in str(
            error(server.post({**asked, "messages": altered}), 400)["message"]
        )
        answer = server.post({**asked, "messages": [*history, more]})
        assert answer.json()["repl"]["answer"] == "42"
        assert server.post({"model": MODEL, "messages": [*history, more]}).status_code == 400


def test_a_refused_turn_leaves_its_conversation_as_it_was() -> None:
    with served() as server:
        id = ours(ask(server.client(), "Six?", keep=True))["conversation"]
        error(server.post(question("Times seven?", n=2, repl={"conversation": id})), 400)
        messages = [{"role": "user", "content": "no"}, {"role": "user", "content": "Times seven?"}]
        error(server.post({"model": MODEL, "messages": messages, "repl": {"conversation": id}}), 400)
        assert ours(ask(server.client(), "Times seven?", conversation=id))["answer"] == "42"


def test_a_conversation_has_one_turn_at_a_time() -> None:
    stuck = Stuck()
    with served(
        scripted(stuck), ServerLimits(max_concurrent=2, max_waiting=2, max_conversations=2, conversation_timeout_s=600)
    ) as server:
        server.thread.call_soon(stuck.may_go_on.set)
        id = ours(ask(server.client(), "Six?", keep=True))["conversation"]
        server.thread.call_soon(stuck.may_go_on.clear)
        second = stream(server.client(), "Times seven?", conversation=id)
        next(iter(second))
        found = error(server.post(question("Is x there?", repl={"conversation": id})), 409)
        assert found["code"] == "busy"
        assert server_delete(server.address, str(id)) == 409
        server.thread.call_soon(stuck.may_go_on.set)
        list(second)


def test_plain_completions_go_on_in_their_console_too() -> None:
    with served() as server:
        client = server.client()
        first = client.completions.create(model=MODEL, prompt="Six?\n>>> ", extra_body={"repl": {"keep": True}})
        id = (first.model_extra or {})["repl"]["conversation"]
        ours_too = {"repl": {"conversation": id, "tokens": True}}
        second = client.completions.create(model=MODEL, prompt="Times seven?\n>>> ", extra_body=ours_too)
        said = (second.model_extra or {})["repl"]
        assert said["answer"] == "42"
        before = "Six?\n>>> " + first.choices[0].text
        assert RENDERER.decode(said["prompt_token_ids"]) == before + "Times seven?\n>>> "


def test_a_sampler_of_another_kind_keeps_no_console() -> None:
    rollouts = replace(scripted(), sampler=FeedbackSampler())
    with served(rollouts) as server:
        found = error(server.post(question("Six?", repl={"keep": True})), 400)
        assert (found["param"], "FeedbackSampler" in str(found["message"])) == ("repl.keep", True)

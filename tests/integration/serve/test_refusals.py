"""What is not done: said in OpenAI's shape, with a status that clients understand, and nothing is played for it."""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from repl_rl.cli import main
from repl_rl.engine import ScriptedEngine
from repl_rl.errors import ConfigError
from repl_rl.serve.auth import VARIABLE, ApiKeys, read_keys
from repl_rl.serve.conversation_service import ServerLimits
from repl_rl.serve.http_errors import RequestError
from repl_rl.serve.openai_requests import NEUTRAL, ChatCompletionRequest, ReplOptions, parse_request
from repl_rl.serve.routes import MAX_BODY_BYTES
from tests.support.processes import wait_for
from tests.support.serve.http_server import MODEL, Server, Stuck, ask, question, scripted, served, stream

KEYS = ("a-key-of-the-first-user", "a-key-of-the-second-user")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served() as server:
        yield server


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    with served(keys=KEYS) as server:
        yield server


def error(said: httpx.Response, status: int) -> Mapping[str, object]:
    """The error in an answer, in the shape that is promised."""
    assert said.status_code == status, said.text
    found = said.json()["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    assert isinstance(found["message"], str)
    assert found["message"]
    return dict(found)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("n", True),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("reasoning_effort", "high"),
        ("top_k", 40),
        ("metadata", {"run": "1"}),
        ("functions", [{"name": "f"}]),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("top_p", 0.9),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("logit_bias", {"5": 100}),
        ("response_format", {"type": "json_object"}),
        ("user", {"id": 1}),
        ("made_up", 1),
        ("function_call", {"name": "f"}),
        ("min_tokens", 1),
        ("ignore_eos", True),
        ("stop_token_ids", [5]),
        ("bad_words", ["a"]),
        ("use_beam_search", True),
        ("length_penalty", 0.5),
        ("skip_special_tokens", False),
        ("include_stop_str_in_output", True),
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_a_parameter_that_would_not_be_honoured_is_refused_by_name(server: Server, field: str, value: object) -> None:
    found = error(server.post(question("Six?", **{field: value})), 400)
    assert (found["param"], found["code"]) == (field, "unsupported_parameter")
    assert field in str(found["message"])


def test_logprobs_of_no_further_token_are_log_probabilities_too(server: Server) -> None:
    asked = {"model": MODEL, "prompt": "Six?\n>>> ", "logprobs": 0}
    assert error(server.post(asked, "completions"), 400)["param"] == "logprobs"


def test_parameters_that_ask_for_nothing_are_taken(server: Server) -> None:
    neutral = {
        "n": 1,
        "tools": [],
        "logprobs": False,
        "top_p": 1,
        "stop": None,
        "presence_penalty": 0.0,
        "made_up": None,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "metadata": {},
        "service_tier": "auto",
        "user": "me",
        "top_k": -1,
        "repetition_penalty": 1.0,
        "max_tokens": 5,
        "max_completion_tokens": 5,
        "stream_options": None,
    }
    assert server.post(question("Six?", **neutral)).status_code == 200


@pytest.mark.parametrize(("field", "value"), [(name, value) for name, values in NEUTRAL.items() for value in values])
def test_each_value_that_asks_for_nothing_is_taken_and_another_one_is_not(field: str, value: object) -> None:
    body = question("Six?", **{field: value})
    assert parse_request(ChatCompletionRequest, json.dumps(body).encode()) == parse_request(
        ChatCompletionRequest, json.dumps(question("Six?")).encode()
    )
    with pytest.raises(RequestError, match=field):
        parse_request(ChatCompletionRequest, json.dumps({**body, field: [value, "more"]}).encode())


@pytest.mark.parametrize("name", [
    "function_call", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words", "use_beam_search", "length_penalty",
    "skip_special_tokens", "include_stop_str_in_output", "add_generation_prompt", "chat_template_kwargs",
])  # fmt: skip
def test_fields_that_clients_send_with_their_defaults_are_among_these(name: str) -> None:
    assert name in NEUTRAL


@pytest.mark.parametrize("more", [
    {"repl": {"show": None, "tokens": None, "keep": None, "conversation": None}},
    {"repl": None}, {"stream_options": {}}, {"stream_options": {"include_usage": False}},
    {"stream_options": {"include_usage": None, "include_obfuscation": False}},
])  # fmt: skip
def test_options_that_ask_for_nothing_are_taken_without_a_stream(more: Mapping[str, object]) -> None:
    found = parse_request(ChatCompletionRequest, json.dumps(question("Six?", **more)).encode())
    assert (found.repl, found.stream) == (ReplOptions(), None)


def test_a_list_of_one_prompt_is_that_prompt_and_two_are_refused(server: Server) -> None:
    one, several = ({"model": MODEL, "prompt": prompt} for prompt in (["Six?\n>>> "], ["Six?\n>>> ", "Seven?\n>>> "]))
    assert server.post(one, "completions").status_code == 200
    assert str(error(server.post(several, "completions"), 400)["param"]).startswith("prompt")


def test_the_clients_own_message_can_be_given_back_as_the_client_has_it(server: Server) -> None:
    """With every field that OpenAI's client knows of a message, null or empty."""
    with server.client() as client:
        said: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Six?"}]
        first = client.chat.completions.create(model=MODEL, messages=said, extra_body={"repl": {"keep": True}})
        ours = (first.model_extra or {})["repl"]
        more = {"repl": {"conversation": ours["conversation"]}}
        answer = first.choices[0].message
        for as_dictionary in (False, True):
            given_back = answer.model_dump() if as_dictionary else answer
            said = cast("list[ChatCompletionMessageParam]", [*said, given_back, {"role": "user", "content": "And?"}])
            answer = client.chat.completions.create(model=MODEL, messages=said, extra_body=more).choices[0].message
            assert answer.content


@pytest.mark.parametrize(
    "field",
    [
        {"name": "me"},
        {"refusal": "no"},
        {"tool_calls": [{"id": "1"}]},
        {"made_up": 1},
        {"reasoning_content": "a"},
        {"images": [{}]},
        {"provider_specific_fields": {"a": 1}},
    ],
)
def test_a_message_that_says_more_than_a_text_is_refused(server: Server, field: Mapping[str, object]) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Six?", **field}]}
    assert f"messages.0.{next(iter(field))}" == error(server.post(asked), 400)["param"]


@pytest.mark.parametrize("field", [
    {"name": None}, {"refusal": None}, {"tool_calls": []}, {"annotations": []}, {"refusal": ""}, {"name": ""},
    {"reasoning_content": ""}, {"images": []}, {"provider_specific_fields": {}},
    {"content": [{"type": "text", "text": "Six?", "annotations": [], "cache_control": None}]},
])  # fmt: skip
def test_fields_of_a_message_that_ask_for_nothing_are_taken(server: Server, field: Mapping[str, object]) -> None:
    asked: dict[str, object] = {"model": MODEL, "messages": [{"role": "user", "content": "Six?", **field}]}
    assert server.post(asked).status_code == 200
    options = {"include_usage": None, "include_obfuscation": False}
    assert server.post({**asked, "stream": True, "stream_options": options}).status_code == 200


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "annotations": [1]}]}]}, None),
        ({"stop": "a\nb"}, "stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": 1}, "stop"),
        ({"repl": {"show": "all"}}, "repl.show"),
        ({"repl": {"shwo": "answer"}}, "repl.shwo"),
        ({"messages": []}, "messages"),
        ({"messages": "Six?"}, "messages"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "Six?"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, "messages"),
        ({"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Six?"}]}, None),
    ],
)
def test_a_value_that_will_not_do_is_refused_by_name(
    server: Server, more: Mapping[str, object], param: str | None
) -> None:
    found = error(server.post(question("Six?", **more)), 400)
    assert found["type"] == "invalid_request_error"
    assert str(found["param"]).startswith(param or "messages.0")


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0: "),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"prompt": ["a", "b"]}, "prompt", "valid string, or: Input should be a valid integer"),
        ({"prompt": [5, -1]}, "prompt", "greater than or equal to 0"),
    ],
)
def test_a_value_that_may_be_of_several_kinds_is_told_what_each_lacks(
    server: Server, more: Mapping[str, object], param: str, said: str
) -> None:
    found = error(server.post({"model": MODEL, "prompt": "Six?\n>>> ", **more}, "completions"), 400)
    assert found["param"] == param
    assert said in str(found["message"])


def test_a_system_message_is_refused_with_the_reason(server: Server) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Six?"}]
    said = error(server.post({"model": MODEL, "messages": messages}), 400)
    assert "the prompt that it was trained with" in str(said["message"])


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000,
        b'{"model": "scripted", "messages": [{"role": "user", "content": "Six?"}], "temperature": NaN}',
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(server: Server, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    said = httpx.post(f"{server.address}/v1/chat/completions", content=body, headers=headers)
    assert error(said, 400)["code"] == "invalid_json"


def test_only_json_is_read_so_that_no_form_of_another_page_is(server: Server) -> None:
    body = json.dumps(question("Six?"))
    said = httpx.post(f"{server.address}/v1/chat/completions", content=body, headers={"Content-Type": "text/plain"})
    error(said, 415)


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_long_is_refused(server: Server, announced: bool) -> None:
    body = json.dumps(question("x" * MAX_BODY_BYTES)).encode()
    parts = iter([body[i : i + 65536] for i in range(0, len(body), 65536)])
    headers = {"Content-Type": "application/json"}
    said = httpx.post(f"{server.address}/v1/chat/completions", content=body if announced else parts, headers=headers)
    assert error(said, 413)["code"] == "body_too_large"


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    rollouts = scripted()
    assert isinstance(rollouts.engine, ScriptedEngine)
    rollouts.engine.context_tokens = 64
    with served(rollouts) as server:
        said = error(server.post(question("Six? " * 64)), 400)
        assert said["code"] == "context_length_exceeded"


def test_a_prompt_of_no_ids_or_of_unknown_ones_is_refused(server: Server) -> None:
    assert error(server.post({"model": MODEL, "prompt": [10**9]}, "completions"), 400)["param"] == "prompt"
    assert error(server.post({"model": MODEL, "prompt": ""}, "completions"), 400)["param"] == "prompt"


def test_another_model_is_not_found(server: Server) -> None:
    assert error(server.post({**question("Six?"), "model": "gpt-5"}), 404)["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("gpt-5")


def test_addresses_and_methods_that_are_not_there_are_said_so(server: Server) -> None:
    without = httpx.post(f"{server.address}/chat/completions", json=question("Six?"))
    assert "/v1/chat/completions" in str(error(without, 404)["message"])
    assert len(str(error(httpx.get(f"{server.address}/{'x' * 9000}"), 404))) < 400
    got = httpx.get(f"{server.address}/v1/chat/completions")
    assert str(error(got, 405)["message"]).endswith("; use POST")
    assert got.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Host": "[::1"},
        {"Origin": "http://[::1"},
    ],
)
def test_pages_of_other_sites_in_a_browser_of_this_machine_are_refused(
    server: Server, headers: Mapping[str, str]
) -> None:
    error(httpx.post(f"{server.address}/v1/chat/completions", json=question("Six?"), headers=dict(headers)), 403)


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer wrong", f"Bearer {KEYS[0]}x", f"Basic {KEYS[0]}", KEYS[0], "Bearer ÿ"]
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/conversations/conv-1"])
def test_without_a_right_key_nothing_is_told(locked: Server, header: str, path: str) -> None:
    headers = {b"Authorization": header.encode("latin-1")} if header else {}
    method = "DELETE" if "conversations" in path else "GET"
    said = httpx.request(method, locked.address + path, headers=headers)
    assert error(said, 401)["code"] == "invalid_api_key"
    assert said.headers["www-authenticate"] == "Bearer"


def test_each_of_several_keys_opens_and_health_needs_none(locked: Server) -> None:
    for key in KEYS:
        assert ask(locked.client(key), "Six?", show="answer").choices[0].message.content == "6"
    assert httpx.get(f"{locked.address}/health").status_code == 200
    with pytest.raises(openai.AuthenticationError):
        ask(locked.client("not-a-key-of-this-server"), "Six?")


def test_every_key_is_compared_by_its_digest() -> None:
    keys = ApiKeys(KEYS)
    first, second = keys.find_owner(f"Bearer {KEYS[0]}"), keys.find_owner(f"bearer  {KEYS[1]} ")
    assert first
    assert second
    assert first != second
    assert not any(key in str(vars(keys)) for key in KEYS)
    assert ApiKeys().find_owner(None) == ""


def test_more_turns_than_may_wait_are_told_when_to_come_back() -> None:
    stuck = Stuck()
    with served(
        scripted(stuck), ServerLimits(max_concurrent=1, max_waiting=0, max_conversations=4, conversation_timeout_s=600)
    ) as server:
        first = stream(server.client(), "Six?")
        next(iter(first))
        for said in (server.post(question("Six?")), server.post(question("Six?", stream=True))):
            found = error(said, 429)
            assert (found["type"], found["code"]) == ("rate_limit_error", "busy")
            assert 1 <= int(said.headers["retry-after"]) <= 60
        server.thread.call_soon(stuck.may_go_on.set)
        assert list(first)[-1].choices == []
        assert server.post(question("Six?")).status_code == 200
        assert server.figure('repl_rl_requests_total{path="/v1/chat/completions",status="429"}') == 2


def test_whoever_may_wait_is_served_when_a_place_is_free() -> None:
    stuck = Stuck()
    with served(
        scripted(stuck), ServerLimits(max_concurrent=1, max_waiting=1, max_conversations=4, conversation_timeout_s=600)
    ) as server:
        first = stream(server.client(), "Six?")
        next(iter(first))
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(server.post, question("Six?", repl={"show": "answer"}))
            wait_for(lambda: server.figure("repl_rl_waiting") == 1, None)
            error(server.post(question("Six?")), 429)
            server.thread.call_soon(stuck.may_go_on.set)
            assert second.result().json()["choices"][0]["message"]["content"] == "6"
        list(first)


def test_keys_come_from_a_file_and_the_environment_and_weak_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of the first user\n{KEYS[0]}\n\n")
    monkeypatch.setenv(VARIABLE, f"{KEYS[1]}, another-key-of-the-second")
    keys = read_keys(file)
    assert all(keys.find_owner(f"Bearer {key}") for key in (*KEYS, "another-key-of-the-second"))
    with pytest.raises(ConfigError, match="at least 16") as short:
        ApiKeys(["short-secret"])
    assert "short-secret" not in str(short.value)
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="no key"):
        read_keys(file)
    with pytest.raises(ConfigError, match=r"cannot be read: .*; give a text file"):
        read_keys(file / "not")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_others_can_reach_needs_keys(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert main(["serve", "--host", host, "--port", "0"]) == 2
    assert "needs keys" in capsys.readouterr().err


def test_consoles_that_isolate_nothing_are_not_for_other_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text(f"{KEYS[0]}\n")
    keys = str(tmp_path / "keys")
    assert main(["serve", "--host", "0.0.0.0", "--port", "0", "--keys", keys, "--sandbox", "unsafe"]) == 2
    assert "use local or docker" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--port 70000", "port"),
        ("--judges task", "a server has no tasks"),
        ("--max-waiting -1", "max_waiting"),
        ("--conversation-timeout-s 0", "conversation_timeout_s"),
        ("--host no.such.host.invalid", "host and port"),
    ],
)
def test_settings_that_will_not_do_are_refused(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *flags.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", server.address.rpartition(":")[2]]) == 2
    said = capsys.readouterr().err
    assert "in use" in said
    assert "choose another --port" in said

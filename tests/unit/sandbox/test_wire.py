"""Whatever arrives is either the reply to our very request, or nothing, or nonsense; never another line's output."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.sandbox.base import Limits
from repl_rl.sandbox.jupyter_wire import (
    DELIMITER,
    MAX_ANSWER_CHARS,
    ConsoleReply,
    JupyterWire,
    MalformedReply,
    replace_surrogates,
)
from repl_rl.sandbox.line_status import make_result_from_reply
from repl_rl.utils.package_data import find_asset

KEY = "k" * 64
CLAIM = {"text": "2\n", "cut": False, "more": False, "outcome": "ok", "answer": None}


def _frames(header: bytes, content: object, key: str = KEY) -> list[bytes]:
    body = [b"{}", header, b"{}", json.dumps(content).encode()]
    return [DELIMITER, JupyterWire(key)._sign(body), *body]


def test_the_reply_to_a_request_is_recognised() -> None:
    wire = JupyterWire(KEY)
    header, frames = wire.encode_request("1 + 1")
    assert json.loads(frames[-1])["code"] == "1 + 1"
    assert wire.decode_reply(_frames(header, {"repl": CLAIM}), header) == ConsoleReply("2\n", False, False, "ok", None)


def test_each_request_has_an_id_of_its_own() -> None:
    wire = JupyterWire(KEY)
    assert len({wire.encode_request("x")[0] for _ in range(1000)}) == 1000


def test_a_reply_to_another_request_or_by_another_key_is_nothing() -> None:
    wire = JupyterWire(KEY)
    earlier, _ = wire.encode_request("1")
    header, _ = wire.encode_request("2")
    assert wire.decode_reply(_frames(earlier, {"repl": CLAIM}), header) is None
    assert wire.decode_reply(_frames(header, {"repl": CLAIM}, key="other"), header) is None


@pytest.mark.parametrize(
    "content",
    [
        5, None, [], {}, {"repl": 5}, {"repl": {}}, {"repl": {**CLAIM, "text": 5}}, {"repl": {**CLAIM, "more": 1}},
        {"repl": {**CLAIM, "outcome": "sandbox_fault"}}, {"repl": {**CLAIM, "outcome": "answered"}},
        {"repl": {**CLAIM, "answer": "x" * (MAX_ANSWER_CHARS + 1)}},
        {"repl": {**CLAIM, "answer": 3}}, {"repl": {**CLAIM, "cut": None}}, {"repl": {**CLAIM, "outcome": ["ok"]}},
    ],
)  # fmt: skip
def test_a_reply_that_no_console_sends_is_nonsense(content: object) -> None:
    wire = JupyterWire(KEY)
    header, _ = wire.encode_request("1")
    with pytest.raises(MalformedReply):
        wire.decode_reply(_frames(header, content), header)


def test_the_longest_answer_of_a_console_is_accepted() -> None:
    found = re.search(
        r"^MAX_ANSWER_CHARS = ([0-9_]+)$", find_asset("sandbox/repl_kernel/execute_line.py").read_text(), re.M
    )
    assert found is not None
    assert int(found[1]) == MAX_ANSWER_CHARS
    wire, answer = JupyterWire(KEY), "é" * MAX_ANSWER_CHARS
    header, _ = wire.encode_request("1")
    reply = wire.decode_reply(_frames(header, {"repl": {**CLAIM, "answer": answer}}), header)
    assert reply is not None
    assert reply.answer == answer


@pytest.mark.parametrize("text", ["x" * 5000, "é" * 2000, "\ufffd" * 1000, "a" + "𝄞" * 256])
def test_text_over_the_limit_is_cut_to_its_bytes_whatever_a_console_sends(text: str) -> None:
    limits = Limits(output_bytes=1024)
    result = make_result_from_reply(ConsoleReply(text, False, False, "ok", None), limits, 0.1, interrupted=False)
    assert result.truncated
    assert 900 < len(result.text.encode()) <= 1024
    assert f"[... {len(text.encode()) - 1024} bytes of output not shown ...]" in result.text


def test_json_that_is_too_deep_is_nonsense() -> None:
    wire = JupyterWire(KEY)
    header, _ = wire.encode_request("1")
    body = [b"{}", header, b"{}", b"[" * 100_000]
    with pytest.raises(MalformedReply):
        wire.decode_reply([DELIMITER, wire._sign(body), *body], header)


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_random_frames_are_nothing(frames: list[bytes]) -> None:
    wire = JupyterWire(KEY)
    header, _ = wire.encode_request("1")
    assert wire.decode_reply(frames, header) is None


@given(st.text(alphabet=st.characters(codec=None, min_codepoint=0, max_codepoint=0x10FFFF)))
def test_text_can_always_be_stored(text: str) -> None:
    assert replace_surrogates(text).encode("utf-8").decode("utf-8") == replace_surrogates(text)

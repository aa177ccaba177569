"""Calls: read without evaluating anything, bound, run with a deadline, and never allowed to hurt anybody else."""

import asyncio
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.errors import ConfigError
from repl_rl.samplers.inline_call_sampler import parse_call, parse_calls
from repl_rl.samplers.tool_call_parsing import Toolbox, ToolCall, ToolFunction, ToolResult
from repl_rl.trajectory.trajectory import LineStatus

literals = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(literals, max_size=3), st.dictionaries(st.sampled_from(["a", "b"]), literals))
def test_a_call_with_literal_arguments_is_read_back(args: list[object], kwargs: dict[str, object]) -> None:
    written = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
    assert parse_call(f" f({written})\n") == ToolCall("f", tuple(args), kwargs)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("f(__import__('os'))", "arguments must be literals"),
        ("f(9**9**9)", "arguments must be literals"),
        ("f('a' * 10**9)", "arguments must be literals"),
        ("f(x)", "arguments must be literals"),
        ("os.system('x')", "write a call such as"),
        ("3", "write a call such as"),
        ("f(**{'a': 1})", "** is not allowed"),
        ("f({[]: 1})", "unhashable"),
        ("f(", "was never closed"),
        ("f(a=1, a=2)", "keyword argument repeated"),
        ("f(" * 150 + ")" * 150, "arguments must be literals"),
        ("f(" + "(" * 500 + ")" * 500 + ")", "too many nested parentheses"),
        ("f(" + "-" * 5_000 + "1)", ""),
        ("f('" + "a" * 10_000 + "')", "at most 8192 characters"),
        ("f(\0)", "null bytes"),
        ("", "invalid syntax"),
    ],
)
def test_what_is_no_literal_call_is_a_syntax_error_and_evaluates_nothing(text: str, told: str) -> None:
    result = parse_call(text)
    assert isinstance(result, ToolResult)
    assert result.status is LineStatus.SYNTAX_ERROR
    assert result.text.startswith("SyntaxError: ")
    assert told in result.text


def run(function: ToolFunction, *args: object, timeout_s: float = 5.0) -> ToolResult:
    call = ToolCall(function.__name__, args)
    return asyncio.run(Toolbox([function], timeout_s).run(call))


def test_plain_and_async_functions_answer_with_their_result_as_text() -> None:
    def plain(a: int) -> int:
        return a + 1

    async def waits(a: int) -> int:
        return a + 2

    def returns_work(a: int) -> object:
        return waits(a)

    assert [run(f, 1).text for f in (plain, waits, returns_work)] == ["2", "3", "3"]


def test_an_unknown_name_and_wrong_arguments_are_told() -> None:
    def double(a: int) -> int:
        return 2 * a

    box = Toolbox([double])
    unknown = asyncio.run(box.run(ToolCall("triple", (1,))))
    wrong = asyncio.run(box.run(ToolCall("double", (), {"b": 1})))
    assert unknown.text == "NameError: there is no function 'triple'; use double"
    assert wrong.text == "TypeError: double() missing a required argument: 'a'"
    assert unknown.status is wrong.status is LineStatus.EXCEPTION


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3), StopIteration(), GeneratorExit("g")])
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_function_raises_is_told_to_its_caller_only(error: BaseException, is_async: bool) -> None:
    def plain() -> None:
        raise error

    async def waits() -> None:
        raise error

    result = run(waits if is_async else plain)
    assert result.status is LineStatus.EXCEPTION
    assert type(error).__name__ in result.text


def test_a_function_that_cancels_itself_does_not_cancel_the_rollout() -> None:
    async def suicidal() -> None:
        raise asyncio.CancelledError

    assert run(suicidal).text == "CancelledError: suicidal cancelled itself"


def test_functions_that_hang_are_left_behind_and_others_go_on() -> None:
    release = threading.Event()

    def hangs() -> None:
        release.wait()

    async def waits() -> None:
        await asyncio.Event().wait()

    def quick() -> str:
        return "done"

    async def both() -> list[ToolResult]:
        box = Toolbox([hangs, waits, quick], timeout_s=0.5)
        return await asyncio.gather(*(box.run(ToolCall(name)) for name in ("hangs", "waits", "quick")))

    results = asyncio.run(both())
    release.set()
    assert [r.status for r in results] == [LineStatus.TIMEOUT, LineStatus.TIMEOUT, LineStatus.OK]
    assert results[0].text == "TimeoutError: hangs took longer than 0.5 s"


def test_a_function_that_always_hangs_is_refused_before_threads_run_out() -> None:
    release = threading.Event()

    def hangs() -> None:
        release.wait()

    async def many() -> tuple[str, int]:
        box = Toolbox([hangs], timeout_s=0.02)
        before = threading.active_count()
        for _ in range(5):
            await asyncio.gather(*(box.run(ToolCall("hangs")) for _ in range(8)))
        return (await box.run(ToolCall("hangs"))).text, threading.active_count() - before

    told, threads = asyncio.run(many())
    release.set()
    assert told == "TimeoutError: hangs hangs in 16 other calls"
    assert threads <= 16 + 8


def test_cancelling_a_rollout_cancels_its_call() -> None:
    cancelled = False

    async def waits() -> None:
        nonlocal cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled = True
            raise

    async def work() -> None:
        call = asyncio.ensure_future(Toolbox([waits]).run(ToolCall("waits")))
        for _ in range(5):
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0)

    asyncio.run(work())
    assert cancelled


def test_calls_of_plain_functions_run_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=5)

    def meets() -> int:
        return meeting.wait()

    async def three() -> list[ToolResult]:
        box = Toolbox([meets])
        return await asyncio.gather(*(box.run(ToolCall("meets")) for _ in range(3)))

    started = time.perf_counter()
    assert sorted(r.text for r in asyncio.run(three())) == ["0", "1", "2"]
    assert time.perf_counter() - started < 5


def one() -> int:
    return 1


@pytest.mark.parametrize(
    ("functions", "timeout_s"), [([], 1.0), ([lambda: 1], 1.0), ([one, one], 1.0), ([one], 0.0), ([max], 1.0)]
)
def test_unusable_functions_are_named(functions: list[ToolFunction], timeout_s: float) -> None:
    with pytest.raises(ConfigError):
        Toolbox(functions, timeout_s)


@pytest.mark.parametrize(
    "text",
    [
        '[f(a=1), g("x", b=[True, None])]',
        'f(a=1), g("x", b=[True, None])',
        ' [ f(a=1),\n  g("x", b=[True, None]) ]\n',
    ],
)
def test_several_calls_are_read_in_order(text: str) -> None:
    assert parse_calls(text) == [ToolCall("f", (), {"a": 1}), ToolCall("g", ("x",), {"b": [True, None]})]


@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_calls_are_read_as_json_alone_or_in_a_list(key: str) -> None:
    one, other = f'{{"name": "f", "{key}": {{"a": true, "b": null}}}}', '{"name": "g"}'
    assert parse_calls(one) == [ToolCall("f", (), {"a": True, "b": None})]
    assert parse_calls(f" [{one}, {other}] ") == [ToolCall("f", (), {"a": True, "b": None}), ToolCall("g")]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[f(1), 2, g(x)]", ["Call", "write a call such as", "arguments must be literals"]),
        ("[]", ["write a call such as"]),
        ('[{"name": 3}, {"name": "f", "arguments": []}]', ['write {"name"', 'write {"name"']),
        ('{"name": "f"', ["the call is not JSON"]),
        ("[f(1), g(", ["was never closed"]),
        ("[" * 300 + "f()" + "]" * 300, ["too many nested"]),
        ("{" * 9000, ["8192 characters"]),
    ],
)
def test_what_is_no_call_among_several_is_told_in_its_place(text: str, told: list[str]) -> None:
    found = parse_calls(text)
    assert len(found) == len(told)
    for each, words in zip(found, told, strict=True):
        assert words in (type(each).__name__ if isinstance(each, ToolCall) else each.text)


def test_no_text_makes_the_reader_of_calls_fail() -> None:
    for text in ("\0", "f(\ud800)", "[{", "[f()", "f()" * 3, "lambda: 0", "f(**{})", "(f)(1)", "f(1)(2)"):
        assert parse_calls(text)

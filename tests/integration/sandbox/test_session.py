"""What one console promises to a rollout, on every kind that runs here and on the in-memory fake."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from repl_rl.errors import ConfigError
from repl_rl.sandbox import InProcessSandbox, Limits, LineResult, Sandbox, SandboxSession, open_sandbox
from repl_rl.trajectory.trajectory import LineStatus

LIMITS = replace(Limits(), line_timeout_s=1.0, interrupt_grace_s=2.0, output_bytes=1024)


@asynccontextmanager
async def _opened(kind: str) -> AsyncIterator[Sandbox]:
    if kind == "inprocess":
        yield InProcessSandbox(LIMITS)
        return
    async with open_sandbox(kind, limits=LIMITS, warm=1) as sandbox:
        yield sandbox


def _in_session(kind: str, body: Callable[[SandboxSession], Awaitable[None]]) -> None:
    async def main() -> None:
        async with _opened(kind) as sandbox, sandbox.session() as session:
            await body(session)

    asyncio.run(main())


async def _results(session: SandboxSession, *lines: str) -> list[LineResult]:
    return [await session.push(line) for line in lines]


every_kind = pytest.mark.parametrize("kind", ["local", "unsafe", "inprocess"])
served_kinds = pytest.mark.parametrize("kind", ["local", "unsafe"])


@every_kind
def test_a_session_speaks_like_the_classic_console(kind: str) -> None:
    async def body(session: SandboxSession) -> None:
        lines = [
            "1 + 1",
            "_ * 2",
            "for i in range(2):",
            "    i",
            "",
            "x = 1",
            "# note",
            "1/0",
            "x = )",
            "print('a', end='')",
        ]
        results = await _results(session, *lines)
        assert [result.text for result in results] == [
            "2\n", "4\n", "", "", "0\n1\n", "", "",
            'Traceback (most recent call last):\n  File "<stdin>", line 1, in <module>\n'
            "ZeroDivisionError: division by zero\n",
            '  File "<stdin>", line 1\n    x = )\n        ^\nSyntaxError: unmatched \')\'\n',
            "a",
        ]  # fmt: skip
        assert [result.incomplete for result in results] == [False, False, True, True, *[False] * 6]
        assert [result.status.value for result in results] == [
            "ok", "ok", "incomplete", "incomplete", "ok", "ok", "ok", "exception", "syntax_error", "ok",
        ]  # fmt: skip
        assert all(result.answer is None and result.elapsed_s >= 0 for result in results)

    _in_session(kind, body)


@every_kind
def test_the_first_answer_wins_and_ends_the_session(kind: str) -> None:
    async def body(session: SandboxSession) -> None:
        result = await session.push("submit_final_answer(6 * 7); submit_final_answer('other'); print('after')")
        assert (result.status, result.answer, result.text) == (LineStatus.ANSWERED, "42", "after\n")
        assert session.ended
        with pytest.raises(ConfigError, match="session"):
            await session.push("1")

    _in_session(kind, body)


@every_kind
def test_several_values_are_one_answer(kind: str) -> None:
    async def body(session: SandboxSession) -> None:
        result = await session.push("submit_final_answer(1, 'b', [2.5])")
        assert (result.status, result.answer) == (LineStatus.ANSWERED, "1, b, [2.5]")

    _in_session(kind, body)


@every_kind
def test_exit_ends_the_session_and_a_line_with_a_newline_is_refused(kind: str) -> None:
    async def body(session: SandboxSession) -> None:
        with pytest.raises(ConfigError, match="newline"):
            await session.push("1\n2")
        assert not session.ended
        assert (await session.push("exit()")).status is LineStatus.EXITED
        assert session.ended

    _in_session(kind, body)


@every_kind
def test_output_over_the_limit_shows_head_tail_and_how_much_is_missing(kind: str) -> None:
    async def body(session: SandboxSession) -> None:
        result = await session.push("print('a' * 2000 + 'é' * 2000 + 'z' * 2000)")
        assert result.status is LineStatus.OUTPUT_LIMIT
        assert result.text.startswith("aaa")
        assert result.text.endswith("zzz\n")
        assert "bytes of output not shown" in result.text
        assert len(result.text.encode()) <= LIMITS.output_bytes

    _in_session(kind, body)


@every_kind
def test_every_kind_cuts_the_same_bytes_and_says_so_whatever_the_status_is(kind: str) -> None:
    marker = "\n[... 6979 bytes of output not shown ...]\n"
    half = (LIMITS.output_bytes - len(marker)) // 2

    async def body(session: SandboxSession) -> None:
        assert not (await session.push("1")).truncated
        result = await session.push("print('a' * 2000 + 'é' * 2000 + 'z' * 2002); submit_final_answer(1)")
        assert (result.status, result.truncated) == (LineStatus.ANSWERED, True)
        assert result.text == "a" * half + marker + "z" * (half - 1) + "\n"

    _in_session(kind, body)


@served_kinds
def test_an_interrupted_line_is_a_timeout_and_the_console_keeps_its_state(kind: str) -> None:
    async def body(session: SandboxSession) -> None:
        await session.push("x = 5")
        await session.push("while True: x")
        result = await session.push("")
        assert result.status is LineStatus.TIMEOUT
        assert result.text.endswith("KeyboardInterrupt\n")
        assert not session.ended
        assert (await session.push("x")).text == "5\n"

    _in_session(kind, body)


@served_kinds
def test_a_line_deaf_to_interrupts_is_killed_and_what_it_printed_is_kept(kind: str) -> None:
    async def body(session: SandboxSession) -> None:
        result = await session.push("print('before'); sum(range(10**13))")
        assert (result.status, result.text, session.ended) == (LineStatus.TIMEOUT, "before\n", True)
        assert result.elapsed_s < LIMITS.line_timeout_s + LIMITS.interrupt_grace_s + 2

    _in_session(kind, body)


@served_kinds
def test_what_a_thread_prints_late_comes_with_the_next_line(kind: str) -> None:
    async def body(session: SandboxSession) -> None:
        await session.push("import threading; go, done = threading.Event(), threading.Event()")
        await session.push("def late(): go.wait(); print('late'); done.set()")
        await session.push("")
        assert (await session.push("t = threading.Thread(target=late); t.start()")).text == ""
        assert (await session.push("go.set(); t.join(); print('now')")).text == "late\nnow\n"

    _in_session(kind, body)


@served_kinds
def test_a_process_that_dies_leaves_its_last_words(kind: str) -> None:
    async def body(session: SandboxSession) -> None:
        await session.push("import os")
        result = await session.push("print('words'); os.kill(os.getpid(), 9)")
        assert (result.status, result.text, session.ended) == (LineStatus.KILLED, "words\n", True)
        assert not result.truncated
        assert result.elapsed_s < 1

    _in_session(kind, body)


@served_kinds
@pytest.mark.parametrize("size", [1024, 400, 5000])
def test_the_limit_of_output_holds_for_bytes_that_are_not_text(kind: str, size: int) -> None:
    async def body(session: SandboxSession) -> None:
        result = await session.push(f"import os; _ = os.write(1, b'\\xff' * {size})")
        assert (result.status, result.truncated) == (LineStatus.OUTPUT_LIMIT, True)
        assert len(result.text.encode()) <= LIMITS.output_bytes
        assert result.text.startswith("\ufffd" * 100)
        assert result.text.endswith("\ufffd" * 100)
        result = await session.push("_ = os.write(1, b'\\xff' * 300)")
        assert (result.text, result.truncated) == ("\ufffd" * 300, False)

    _in_session(kind, body)


@served_kinds
def test_an_answer_that_a_line_puts_past_the_limit_is_a_fault(kind: str) -> None:
    async def body(session: SandboxSession) -> None:
        result = await session.push("submit_final_answer.__closure__[0].cell_contents.final_answer = 'x' * 900_000")
        assert (result.status, result.answer) == (LineStatus.SANDBOX_FAULT, None)
        assert session.ended

    _in_session(kind, body)


@served_kinds
def test_last_words_that_are_too_many_are_cut_and_say_so(kind: str) -> None:
    async def body(session: SandboxSession) -> None:
        await session.push("import os")
        result = await session.push("print('w' * 5000); os.kill(os.getpid(), 9)")
        assert (result.status, result.truncated) == (LineStatus.KILLED, True)
        assert "bytes of output not shown" in result.text

    _in_session(kind, body)


@served_kinds
def test_a_forked_child_ends_with_its_line(kind: str) -> None:
    async def body(session: SandboxSession) -> None:
        await session.push("import os")
        await session.push("pid = os.fork()")
        result = await session.push("os.waitpid(pid, 0)[1], pid != 0")
        assert result.text == "(0, True)\n"

    _in_session(kind, body)


@served_kinds
def test_sessions_share_nothing(kind: str) -> None:
    async def main() -> None:
        async with _opened(kind) as sandbox:
            async with sandbox.session() as first, sandbox.session() as second:
                await first.push("import builtins, sys; builtins.spam = sys.spam = 1; open('file', 'w').close()")
                assert (await second.push("import os, sys; hasattr(sys, 'spam'), os.listdir()")).text == "(False, [])\n"
            async with sandbox.session() as third:
                assert "NameError" in (await third.push("spam")).text

    asyncio.run(main())


def test_a_cancelled_line_leaves_no_console_behind() -> None:
    async def main() -> None:
        async with _opened("local") as sandbox:
            async with sandbox.session() as session:
                task = asyncio.create_task(session.push("import time; time.sleep(100)"))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert session.ended
            async with sandbox.session() as session:
                assert (await session.push("1")).text == "1\n"

    asyncio.run(main())


def test_preloaded_modules_cost_a_console_nothing() -> None:
    async def main() -> None:
        async with open_sandbox("local", preload=("fractions",), warm=0) as sandbox, sandbox.session() as session:
            assert (await session.push("import sys; 'fractions' in sys.modules")).text == "True\n"

    asyncio.run(main())


@served_kinds
def test_a_console_whose_output_was_full_prints_on(kind: str) -> None:
    async def body(session: SandboxSession) -> None:
        await _results(session, "import os", "while 1: os.write(1, b'x' * 10**6)")
        full = await session.push("")
        assert full.status is LineStatus.OUTPUT_LIMIT
        assert [r.text for r in await _results(session, "6 * 7", "print('y')")] == ["42\n", "y\n"]

    _in_session(kind, body)


@served_kinds
def test_each_console_draws_random_numbers_of_its_own(kind: str) -> None:
    async def main() -> set[str]:
        async with _opened(kind) as sandbox:
            drawn = set()
            for _ in range(3):
                async with sandbox.session() as session:
                    drawn.add((await _results(session, "import random", "random.random()"))[-1].text)
            return drawn

    assert len(asyncio.run(main())) == 3


def test_a_hook_for_errors_of_this_process_changes_nothing_that_its_consoles_print() -> None:
    async def body(session: SandboxSession) -> None:
        assert (await session.push("1/0")).text.startswith("Traceback (most recent call last):\n")

    hook = sys.excepthook
    sys.excepthook = lambda *_: print("mine")
    try:
        _in_session("inprocess", body)
        assert sys.excepthook is not hook
    finally:
        sys.excepthook = hook

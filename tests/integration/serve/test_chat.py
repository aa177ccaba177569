"""`repl-rl chat`: questions at a terminal, to a server and to a policy that is opened here."""

import io
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from repl_rl.cli import main
from repl_rl.cli.chat import VARIABLE
from tests.support.serve.http_server import BOUNDS, Server, served

KEY = "a-key-of-somebody-whom-we-know"


@pytest.fixture
def server() -> Iterator[Server]:
    with served(keys=[KEY]) as server:
        yield server


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_questions_to_a_server_are_answered_in_one_console(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    typed(monkeypatch, "Six?", "Times seven?")
    assert main(["chat", "--server", f"{server.address}/v1"]) == 0
    shown = capsys.readouterr().out
    assert ">>> x = 6\n>>> x\n6\n>>> submit_final_answer(x)\n6\n" in shown
    assert ">>> submit_final_answer(x * 7)\n42\n" in shown
    assert server.figure("repl_rl_conversations") == 0, "it is ended with the chat"


def test_a_console_that_ended_is_followed_by_a_new_one_and_that_is_said(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    typed(monkeypatch, "Leave?", "Is x there?")
    assert main(["chat", "--server", f"{server.address}/v1"]) == 0
    shown = capsys.readouterr().out
    assert "[exited; the next question begins in a new console]" in shown
    assert "False" in shown


class Slow:
    """Standard input of somebody who asks only when the server keeps no console any more."""

    def __init__(self, server: Server, *lines: str) -> None:
        self._server = server
        self._lines = list(lines)

    def readline(self) -> str:
        self._server.wait(lambda: self._server.figure("repl_rl_conversations") == 0)
        return f"{self._lines.pop(0)}\n" if self._lines else ""


def test_whoever_asks_when_the_console_is_gone_is_told_and_goes_on_in_a_new_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with served(bounds=replace(BOUNDS, conversation_timeout_s=0.01)) as server:
        monkeypatch.setattr("sys.stdin", Slow(server, "Six?", "Times seven?", "Is x there?"))
        assert main(["chat", "--server", f"{server.address}/v1"]) == 0
    shown = capsys.readouterr().out
    assert "no answer\n[kept no longer; the next question begins in a new console]\n" in shown
    assert "\nFalse\n" in shown


def test_a_server_that_refuses_or_is_not_there_is_said_so(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert main(["chat", "--server", f"{server.address}/v1"]) == 2
    said = capsys.readouterr().err
    assert "no API key" in said
    assert VARIABLE in said
    assert main(["chat", "--server", "http://127.0.0.1:1/v1"]) == 2
    said = capsys.readouterr().err
    assert "does not answer" in said
    assert "`repl-rl serve`" in said
    assert main(["chat", "--server", "127.0.0.1:1"]) == 2
    assert main(["chat", "--server", "http://127.0.0.1:1/v1", "--prompt", "chat"]) == 2
    assert "its own settings" in capsys.readouterr().err


class _Nested(BaseHTTPRequestHandler):
    """A hostile server: each of its answers is nested without end."""

    listed = b'{"data": [{"id": "m"}]}'
    deep = b"[" * 100_000

    def do_GET(self) -> None:
        self._answer(200, self.deep if self.path.startswith("/first") else self.listed)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.startswith("/refused"):
            self._answer(500, self.deep)
        else:
            self._answer(200, b"data: " + self.deep + b"\n\n")

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("where", ["first", "event", "refused"])
def test_a_server_whose_answer_is_nested_without_end_is_one_line(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "Six?")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Nested) as hostile:
        thread = threading.Thread(target=hostile.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        assert main(["chat", "--server", f"http://127.0.0.1:{hostile.server_address[1]}/{where}"]) == 2
        hostile.shutdown()
        thread.join()
    (line,) = capsys.readouterr().err.splitlines()
    assert ("it refuses (500)" if where == "refused" else "does not answer as `repl-rl serve` does") in line
    assert len(line) < 500


def test_what_lines_print_does_not_steer_the_terminal(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    typed(monkeypatch, "Steer?")
    assert main(["chat", "--server", f"{server.address}/v1"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\\x1b[2J[bold]" in shown


def test_a_policy_that_is_opened_here_is_asked_as_a_server_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "What is 37 * 4 + 12?", "What is 3 + 5?")
    assert main(["chat", "--engine", "transformers"]) == 0
    assert capsys.readouterr().out.count(">>> ") >= 2

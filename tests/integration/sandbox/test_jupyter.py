"""An ordinary Jupyter client gets what the messaging protocol promises, isolated by our provisioner or not."""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from jupyter_client.manager import KernelManager

from repl_rl.sandbox.conformance.isolation import HOMES
from repl_rl.sandbox.jupyter_wire import JupyterWire
from tests.support.processes import wait_for
from tests.support.sandbox.kernel_client import TIMEOUT_S, Client, installed, launched, started


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "isolated"])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with installed(tmp_path_factory.mktemp("jupyter"), isolated=request.param), started() as client:
        yield client


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with installed(tmp_path_factory.mktemp("jupyter"), isolated=False), started() as client:
        yield client


def test_a_kernel_started_by_its_name_runs_cells(either: Client) -> None:
    ran = either.run("x = 20\ndef f(n):\n    return n + 1\nf(x)")
    assert ran.reply["status"] == "ok"
    assert ran.outputs == [
        (
            "execute_result",
            {"data": {"text/plain": "21"}, "metadata": {}, "execution_count": ran.reply["execution_count"]},
        )
    ]


def test_the_isolated_kernel_sees_neither_network_nor_home(tmp_path: Path) -> None:
    with installed(tmp_path, isolated=True), started() as client:
        *lines, others = HOMES
        ran = client.run("\n".join([*lines, f"import socket\n{others}, socket.if_nameindex()"]))
        assert ran.data("execute_result") == [{"text/plain": "([], [(1, 'lo')])"}]


def test_what_echoes_before_the_last_expression_is_printed_as_in_the_console(kernel: Client) -> None:
    ran = kernel.run("1\nfor i in range(2):\n    i\nNone\n'last'")
    assert ran.text("stdout") == "1\n0\n1\n"
    assert ran.data("execute_result") == [{"text/plain": "'last'"}]
    assert kernel.run("_").data("execute_result") == [{"text/plain": "'last'"}]
    assert kernel.run("import sys; sys.displayhook = print").outputs == []
    assert kernel.run("'mine'").text("stdout") == "mine\n"
    assert kernel.run("sys.displayhook = sys.__displayhook__\n1").data("execute_result") == [{"text/plain": "1"}]


BROKEN = "class Broken:\n    def __repr__(self):\n        raise OSError('none')\nx = 1\nBroken()"


@pytest.mark.parametrize(
    ("code", "x", "ename", "evalue", "lines"),
    [
        ("x = 1\n1/0\nx = 2", 1, "ZeroDivisionError", "division by zero", ['  File "<stdin>", line 2, in <module>']),
        ("x = 1\ndef f(:\n", 0, "SyntaxError", "invalid syntax", ['  File "<stdin>", line 2', "    def f(:"]),
        ("x = 1\nreturn 1", 0, "SyntaxError", "'return' outside function", ['  File "<stdin>", line 2']),
        ("x = 1\nfor i in range(3):", 0, "IndentationError", "expected an indented block", []),
        ("x = 1; raise SystemExit(3)", 1, "SystemExit", "3", ["SystemExit: 3"]),
        ("x = 1; raise KeyboardInterrupt", 1, "KeyboardInterrupt", "", ["KeyboardInterrupt"]),
        (BROKEN, 1, "OSError", "none", ['  File "<stdin>", line 3, in __repr__', "OSError: none"]),
    ],
)
def test_an_error_is_a_message_and_not_printed(
    kernel: Client, code: str, x: int, ename: str, evalue: str, lines: list[str]
) -> None:
    kernel.run("x = 0")
    ran = kernel.run(code)
    assert ran.kinds == ["error"]
    error = ran.outputs[0][1]
    assert error == {name: ran.reply[name] for name in ("ename", "evalue", "traceback")}
    assert (ran.reply["status"], error["ename"]) == ("error", ename)
    assert str(error["evalue"]).startswith(evalue)
    shown = error["traceback"]
    assert isinstance(shown, list)
    assert set(lines) <= set(shown)
    assert not any("repl_kernel" in line or "ipykernel" in line for line in shown)
    # What is no Python runs none of its statements.
    assert kernel.run("x").data("execute_result") == [{"text/plain": str(x)}]


def test_stdout_and_stderr_are_two_streams_whoever_writes(either: Client) -> None:
    program = (
        "import os, subprocess, sys\n"
        "print('a'); print('b', file=sys.stderr)\n"
        "_ = os.write(1, b'c\\n'), os.write(2, b'd\\n')\n"
        "_ = subprocess.run('echo e; echo f >&2', shell=True)\n"
        "_ = sys.stdout.write('ü€𝄞'); _ = os.write(1, b'\\xff')"
    )
    ran = either.run(program)
    assert ran.text("stdout") == "a\nc\ne\nü€𝄞\ufffd"
    assert ran.text("stderr") == "b\nd\nf\n"
    assert set(ran.kinds) == {"stream"}


def test_output_and_displays_arrive_in_order(kernel: Client) -> None:
    ran = kernel.run("from IPython.display import display\nfor i in range(50):\n    print(i)\n    display(i)\n'end'")
    seen = [str(c.get("text") or c["data"]["text/plain"]).strip() for _, c in ran.outputs]  # type: ignore[index]
    assert seen == [str(i) for i in range(50) for _ in range(2)] + ["'end'"]


def test_a_flood_arrives_whole(kernel: Client) -> None:
    ran = kernel.run("for i in range(40): print('x' * 99_999)")
    assert len(ran.text("stdout")) == 4_000_000


@pytest.mark.parametrize("how", ["message", "signal"])
def test_output_arrives_while_the_cell_runs_and_an_interrupt_ends_it(either: Client, how: str) -> None:
    waiting = either.client.execute("import time\nprint('begun')\nwhile True: time.sleep(0.01)")
    either.wait_for(waiting, "begun")
    if how == "message":
        assert either.interrupt_by_message() == {"status": "ok"}
    else:
        either.manager.signal_kernel(signal.SIGINT)
    ran = either.finish(waiting)
    assert ran.kinds == ["error"]
    assert ran.reply["ename"] == "KeyboardInterrupt"
    assert either.run("1").reply["status"] == "ok"


def test_an_interrupt_reaches_the_processes_of_a_cell(either: Client) -> None:
    waiting = either.client.execute("import subprocess; subprocess.run('echo begun; sleep 1000', shell=True)")
    either.wait_for(waiting, "begun")
    either.manager.interrupt_kernel()
    assert either.finish(waiting).reply["ename"] == "KeyboardInterrupt"


def test_an_interrupt_between_cells_changes_nothing(kernel: Client) -> None:
    kernel.run("import signal; before = signal.getsignal(signal.SIGINT)")
    kernel.interrupt_by_message()
    ran = kernel.run("signal.getsignal(signal.SIGINT) is before is signal.default_int_handler")
    assert ran.data("execute_result") == [{"text/plain": "True"}]


def test_an_error_aborts_what_waits_behind_it_and_nothing_else(kernel: Client) -> None:
    kernel.run("ran = []")
    first, second = (kernel.client.execute(code) for code in ("input(); 1/0", "ran.append(1)"))
    known = kernel.client.kernel_info()
    # The first cell fails only after the others were sent, however slow this process is.
    kernel.client.get_stdin_msg(timeout=TIMEOUT_S)
    kernel.client.input("")
    assert kernel.finish(first).reply["status"] == "error"
    assert kernel.finish(second).reply["status"] == "aborted"
    assert kernel.finish(known).reply["status"] == "ok"
    assert kernel.run("ran").data("execute_result") == [{"text/plain": "[]"}]
    first, second = kernel.client.execute("1/0", stop_on_error=False), kernel.client.execute("ran.append(1)")
    assert kernel.finish(first).reply["status"] == "error"
    assert kernel.finish(second).reply["status"] == "ok"


def test_a_silent_cell_publishes_nothing_and_is_not_remembered(kernel: Client) -> None:
    before = kernel.run("'before'").reply["execution_count"]
    noisy = "from IPython.display import display; import sys; print(1); print(1, file=sys.stderr); display(1); "
    for code, status in (("secret = 7; 7", "ok"), ("1/0", "error")):
        ran = kernel.run(noisy + code, silent=True)
        assert (ran.reply["status"], ran.reply["execution_count"], ran.outputs) == (status, before, [])
    ran = kernel.run("secret", store_history=False)
    assert ran.reply["execution_count"] == before
    assert ran.data("execute_result") == [{"text/plain": "7"}]
    reply = kernel.reply(kernel.client.history(hist_access_type="tail", n=1, output=True))
    assert reply["history"] == [[1, before, ["'before'", "'before'"]]]
    assert kernel.run("1").reply["execution_count"] == int(str(before)) + 1


def test_features_of_future_and_names_last_from_cell_to_cell(kernel: Client) -> None:
    kernel.run("from __future__ import annotations")
    ran = kernel.run("def f(x: nowhere): pass\nf.__annotations__")
    assert ran.data("execute_result") == [{"text/plain": "{'x': 'nowhere'}"}]


def test_a_child_that_a_cell_forks_is_no_second_kernel(kernel: Client) -> None:
    ran = kernel.run(
        "import os\nchild = os.fork()\nif child: _ = os.waitpid(child, 0)\nprint('parent' if child else 'child')"
    )
    assert sorted(ran.text("stdout").split()) == ["child", "parent"]
    assert kernel.run("1").data("execute_result") == [{"text/plain": "1"}]


def test_a_restarted_kernel_keeps_its_clients_and_forgets_the_rest(either: Client) -> None:
    either.run("left = 1")
    either.manager.restart_kernel()
    while either.client.get_iopub_msg(timeout=TIMEOUT_S)["msg_type"] != "iopub_welcome":
        pass
    ran = either.run("left")
    assert (ran.reply["ename"], ran.reply["execution_count"]) == ("NameError", 1)


def test_a_kernel_that_was_killed_is_started_again(either: Client) -> None:
    """Jupyter interrupts before it restarts, whether anybody is there or not."""
    either.manager.signal_kernel(signal.SIGKILL)
    wait_for(lambda: not either.manager.is_alive(), None)
    either.manager.restart_kernel()
    while either.client.get_iopub_msg(timeout=TIMEOUT_S)["msg_type"] != "iopub_welcome":
        pass
    assert either.run("6 * 7").data("execute_result") == [{"text/plain": "42"}]


def asking(manager: KernelManager, stack: ExitStack) -> tuple[zmq.Socket[bytes], Callable[[], Sequence[str]]]:
    """A client's shell that has asked for a cell, and what lets the client hear what the kernel publishes."""
    found, context = manager.get_connection_info(session=True), stack.enter_context(zmq.Context())
    shell, heard = stack.enter_context(context.socket(zmq.DEALER)), stack.enter_context(context.socket(zmq.SUB))
    shell.linger = heard.linger = 0
    shell.connect(f"tcp://127.0.0.1:{found['shell_port']}")
    found["session"].send(shell, "execute_request", {"code": "6 * 7"})

    def listen() -> list[str]:
        heard.subscribe(b"")
        heard.connect(f"tcp://127.0.0.1:{found['iopub_port']}")
        kinds = list[str]()
        while "execute_result" not in kinds:
            assert heard.poll(int(1000 * TIMEOUT_S))
            kinds.append(kind(heard.recv_multipart()))
        return [each for each in kinds if each != "starting"]  # said before the client heard anything, or not

    return shell, listen


def kind(frames: Sequence[bytes]) -> str:
    """The type of a message; of a status, which it is."""
    header, _, _, content = map(json.loads, frames[frames.index(b"<IDS|MSG>") + 2 :][:4])
    return str(content["execution_state"] if header["msg_type"] == "status" else header["msg_type"])


def test_the_first_request_waits_until_its_client_hears_what_it_publishes(tmp_path: Path) -> None:
    with installed(tmp_path, isolated=False), launched() as manager, ExitStack() as stack:
        shell, listen = asking(manager, stack)
        assert not shell.poll(200)
        assert listen() == ["iopub_welcome", "busy", "execute_input", "execute_result"]


def test_a_client_that_hears_nothing_is_answered_all_the_same(tmp_path: Path) -> None:
    with installed(tmp_path, isolated=False), launched() as manager, ExitStack() as stack:
        shell, _ = asking(manager, stack)
        assert shell.poll(int(1000 * TIMEOUT_S))
        assert kind(shell.recv_multipart()) == "execute_reply"


@pytest.mark.soak
def test_clients_that_subscribe_and_ask_at_the_same_moment_hear_that_it_is_busy(kernel: Client) -> None:
    address = f"tcp://127.0.0.1:{kernel.client.get_connection_info()['iopub_port']}"
    process = kernel.manager.provisioner.process  # type: ignore[union-attr]
    context = kernel.client.context
    missed = 0
    for _ in range(60):
        with context.socket(zmq.SUB) as subscriber:
            subscriber.linger = 0
            with subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
                subscriber.connect(address)
                monitor.recv_multipart()
                subscriber.disable_monitor()
            process.send_signal(signal.SIGSTOP)
            subscriber.subscribe(b"")
            asked = kernel.client.execute("1")
            process.send_signal(signal.SIGCONT)
            kernel.reply(asked)
            heard = (subscriber.recv_multipart() for _ in range(2))
            kinds = [kind(frames) for frames in heard]
            missed += kinds != ["iopub_welcome", "busy"]
    # 1 or 2, where the request was heard first; 11 to 23 where cells are published before subscriptions are looked at.
    assert missed <= 6


def test_a_shutdown_ends_the_kernel_while_a_cell_runs(tmp_path: Path) -> None:
    with installed(tmp_path, isolated=False), started() as client:
        waiting = client.client.execute("print('begun')\nwhile True: pass")
        client.wait_for(waiting, "begun")
        client.client.control_channel.send(client.client.session.msg("shutdown_request", {"restart": False}))
        assert client.client.get_control_msg(timeout=TIMEOUT_S)["content"] == {"status": "ok", "restart": False}
        process = client.manager.provisioner.process  # type: ignore[union-attr]
        assert process.wait(timeout=TIMEOUT_S) == 0


@pytest.mark.parametrize("channel", ["control", "shell"])
def test_a_message_that_cannot_be_read_is_dropped_and_the_kernel_lives(kernel: Client, channel: str) -> None:
    connection = dict(kernel.manager.get_connection_info())
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = int(1000 * TIMEOUT_S)
        stranger.connect(f"tcp://{connection['ip']}:{connection[f'{channel}_port']}")
        for frames in ([b"garbage"], [b""], [b"<IDS|MSG>"], [b"<IDS|MSG>", b"unsigned", b"{}", b"{}", b"{}", b"{}"]):
            stranger.send_multipart(frames)
        # A message that the kernel answers comes after them.
        kernel.client.session.send(stranger, "kernel_info_request", {})
        assert stranger.poll(int(1000 * TIMEOUT_S))
        frames = stranger.recv_multipart()
        assert json.loads(frames[frames.index(b"<IDS|MSG>") + 2])["msg_type"] == "kernel_info_reply"
    assert kernel.interrupt_by_message()["status"] == "ok"
    ran = kernel.run("6 * 7")
    assert ran.kinds == ["execute_result"]


def test_the_mode_goes_with_the_request_lines_keep_their_merged_text(kernel: Client) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    connection = kernel.manager.get_connection_info()
    socket.connect(f"tcp://{connection['ip']}:{connection['shell_port']}")
    wire = JupyterWire(kernel.client.session.key.decode())
    program = "import sys; print('a'); print('b', file=sys.stderr); print('c'); 1/0"
    merged = 'a\nb\nc\nTraceback (most recent call last):\n  File "<stdin>", line 1, in <module>\n'
    merged += "ZeroDivisionError: division by zero\n"
    try:
        for _ in range(2):
            ran = kernel.run(program)
            assert (ran.text("stdout"), ran.text("stderr"), ran.kinds[-1]) == ("a\nc\n", "b\n", "error")
            header, frames = wire.encode_request(program)
            socket.send_multipart(frames)
            assert socket.poll(int(TIMEOUT_S * 1000))
            reply = wire.decode_reply(socket.recv_multipart(), header)
            assert reply is not None
            assert (reply.text, reply.claimed_outcome) == (merged, "exception")
    finally:
        socket.close(0)

"""Console as an ordinary Jupyter kernel: `python -m repl_kernel -f CONNECTION_FILE [--sealed] [--user UID]`.

With `--sealed` it first gives up every capability and most system calls, for a kernel that starts inside a sandbox.
With `--user`, root becomes that user before it reads the file.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence

if __name__ == "__main__":
    filters = list(warnings.filters)
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import zmq

from repl_kernel import libc_calls as system
from repl_kernel.execute_line import reset_interpreter
from repl_kernel.jupyter_entry import CONTROL_THREAD, JupyterKernel, OutputChannels, ZmqSocket, open_pipes
from repl_kernel.linux_namespaces import drop_privileges
from repl_kernel.output_capture import OutputCapture
from repl_kernel.parse_cells import CellConsole

_OUTPUT_BYTES = 1_048_576
_SENDING_MS = 1000
_HEARTBEAT_THREAD = "heartbeat"


def _bind_socket(socket: ZmqSocket, connection: dict[str, str], port: str) -> ZmqSocket:
    socket.linger = _SENDING_MS
    separator = ":" if connection["transport"] == "tcp" else "-"
    socket.bind(f"{connection['transport']}://{connection['ip']}{separator}{connection[port]}")
    return socket


def _echo_heartbeats(socket: ZmqSocket) -> None:
    """Send every heartbeat back, also while a line computes."""
    try:
        zmq.proxy(socket, socket)
    except zmq.ZMQError:
        # The kernel ends.
        return


def start_kernel(arguments: argparse.Namespace, warning_filters: Sequence[object]) -> JupyterKernel:
    """Create the kernel of a connection file, listening."""
    if arguments.user:
        system.become_user(arguments.user)
    with open(arguments.file) as file:
        connection = json.load(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pipes = open_pipes()
    if arguments.sealed:
        drop_privileges()
    kernel = JupyterKernel()
    key = connection["key"].encode()
    context: zmq.Context[ZmqSocket] = zmq.Context()
    # The control thread has its own context, which it ends without the other sockets.
    control_context: zmq.Context[ZmqSocket] = zmq.Context()
    iopub = control_context.socket(zmq.XPUB)
    # A client receives nothing before its welcome.
    iopub.xpub_manual = True
    _bind_socket(iopub, connection, "iopub_port")
    control = _bind_socket(control_context.socket(zmq.ROUTER), connection, "control_port")
    shell = _bind_socket(context.socket(zmq.ROUTER), connection, "shell_port")
    stdin = _bind_socket(context.socket(zmq.ROUTER), connection, "stdin_port")
    heartbeat = _bind_socket(context.socket(zmq.REP), connection, "hb_port")
    threading.Thread(target=_echo_heartbeats, args=(heartbeat,), daemon=True, name=_HEARTBEAT_THREAD).start()
    with tempfile.TemporaryDirectory() as folder:
        capture = OutputCapture(folder, _OUTPUT_BYTES)
    capture.redirect_and_reopen()
    reset_interpreter(warning_filters, own_threads=(_HEARTBEAT_THREAD, CONTROL_THREAD))
    console = CellConsole(before_traceback=capture.free_middle)
    console.install_submit_function()
    kernel.start_console(key, console, capture, shell)
    kernel.open_channels(
        OutputChannels(kernel.session, control_context, control, iopub, pipes), stdin, capture, console
    )
    return kernel


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="repl_kernel")
    parser.add_argument("-f", dest="file", required=True, metavar="CONNECTION_FILE")
    parser.add_argument("--sealed", action="store_true")
    parser.add_argument("--user", type=int, metavar="UID")
    started = start_kernel(parser.parse_args(), filters)
    sys.path[0] = ""
    started.run_loop()

"""The moments between a console's fork and its first line."""

import subprocess
import sys
from pathlib import Path

import zmq

from repl_rl.sandbox.jupyter_wire import ConsoleReply, JupyterWire
from repl_rl.utils.package_data import find_asset

KEY = "k" * 64
BORN = """
import os, signal, sys
sys.path.insert(0, {package!r})
from repl_kernel import linux_namespaces, timeout_supervisor
from repl_kernel.request_loop import ReplKernel

class Overdue:
    '''A supervisor that interrupts as soon as it hears that the console is ready.'''
    def send(self, packet):
        os.kill(os.getpid(), signal.SIGINT)
    def close(self):
        os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a fork server
request = linux_namespaces.ConsoleRequest(uid=0, cpu_s=60, memory_mb=256, output_bytes=4096, processes=8, open_files=64,
                        disk_mb=16, inodes=64)
place = timeout_supervisor.ConsoleFolders({folder!r}, {folder!r}, is_temporary=False)
kernel = ReplKernel()
capture = linux_namespaces.open_capture(request, place, isolated=False)
linux_namespaces.become_console(
    kernel, request, {key!r}.encode(), Overdue(), capture, place, isolated=False, prepared=None
)
kernel.run_loop()
"""
"""A console without namespaces, started without a fork server."""


def said(folder: Path, code: str) -> ConsoleReply | None:
    """What the console in `folder` answers to a line."""
    wire = JupyterWire(KEY)
    header, frames = wire.encode_request(code)
    with zmq.Context() as context, context.socket(zmq.DEALER) as shell:
        shell.linger, shell.rcvtimeo = 0, 30_000
        shell.connect(f"ipc://{folder}/shell")
        shell.send_multipart(frames)
        return wire.decode_reply(shell.recv_multipart(), header)


def test_an_interrupt_that_comes_before_the_first_line_does_not_end_the_console(tmp_path: Path) -> None:
    program = BORN.format(package=str(find_asset("sandbox")), key=KEY, folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", program]) as console:
        try:
            assert said(tmp_path, "6 * 7") == ConsoleReply("42\n", False, False, "ok", None)
            default = said(tmp_path, "import signal; signal.getsignal(signal.SIGINT) is signal.default_int_handler")
            assert default == ConsoleReply("True\n", False, False, "ok", None), "its lines can be interrupted"
        finally:
            console.kill()

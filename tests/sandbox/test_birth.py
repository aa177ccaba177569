"""The moments between a console's fork and its first line."""

import subprocess
import sys
from pathlib import Path

import zmq

from repl_rl.machine.assets import asset
from repl_rl.sandbox.wire import Reply, Wire

KEY = "k" * 64
BORN = """
import os, signal, sys
sys.path.insert(0, {package!r})
from repl_kernel import birth, keeper
from repl_kernel.kernel import ReplKernel

class Overdue:
    '''A supervisor that interrupts as soon as it hears that the console is ready.'''
    def send(self, packet):
        os.kill(os.getpid(), signal.SIGINT)
    def close(self):
        os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a fork server
request = birth.Request(uid=0, cpu_s=60, memory_mb=256, output_bytes=4096, processes=8, open_files=64,
                        disk_mb=16, inodes=64)
place = keeper.Place({folder!r}, {folder!r}, temporary=False)
kernel = ReplKernel()
capture = birth.open_capture(request, place, isolated=False)
birth.become_console(kernel, request, {key!r}.encode(), Overdue(), capture, place, isolated=False, prepared=None)
kernel.serve()
"""
"""A console without namespaces, started without a fork server."""


def said(folder: Path, code: str) -> Reply | None:
    """What the console in `folder` answers to a line."""
    wire = Wire(KEY)
    header, frames = wire.request(code)
    with zmq.Context() as context, context.socket(zmq.DEALER) as shell:
        shell.linger, shell.rcvtimeo = 0, 30_000
        shell.connect(f"ipc://{folder}/shell")
        shell.send_multipart(frames)
        return wire.reply(shell.recv_multipart(), header)


def test_an_interrupt_that_comes_before_the_first_line_does_not_end_the_console(tmp_path: Path) -> None:
    program = BORN.format(package=str(asset("sandbox")), key=KEY, folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", program]) as console:
        try:
            assert said(tmp_path, "6 * 7") == Reply("42\n", False, False, "ok", None)
            default = said(tmp_path, "import signal; signal.getsignal(signal.SIGINT) is signal.default_int_handler")
            assert default == Reply("True\n", False, False, "ok", None), "its lines can be interrupted"
        finally:
            console.kill()

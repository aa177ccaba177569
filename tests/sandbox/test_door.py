"""Asking for a console of a fork server that is let go meanwhile."""

import asyncio
import os
import socket

import pytest
import zmq

from repl_rl.errors import SandboxFault
from repl_rl.sandbox.base import Limits
from repl_rl.sandbox.door import Door


async def born_too_late() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    door = Door(ours, context, lambda: "nothing", isolated=False)
    asked = asyncio.create_task(door.open_console(Limits(), uid=0, decide=True))
    _, (console,), _, _ = await asyncio.to_thread(socket.recv_fds, theirs, 1 << 16, 1)
    with socket.socket(fileno=console) as born, ours, theirs:
        process, folder = os.pidfd_open(os.getpid()), os.open("/", os.O_PATH)
        socket.send_fds(born, [b"B"], [process, folder])
        born.send(b"R")
        context.destroy()
        os.close(process)
        os.close(folder)
        await asked


def test_a_console_that_is_born_as_its_fork_server_is_let_go_is_a_fault_of_ours() -> None:
    with pytest.raises(SandboxFault, match="a console died at birth: nothing"):
        asyncio.run(born_too_late())

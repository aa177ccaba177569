"""A fork server that is let go, or is late, while it is asked."""

import asyncio
import json
import os
import socket
import time

import pytest
import zmq

from repl_rl.errors import SandboxFault, SetupError
from repl_rl.sandbox.base import Limits
from repl_rl.sandbox.fork_server_client import SpawnSocket
from repl_rl.tasks.task_workspace import Workspace


async def born_too_late() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    door = SpawnSocket(ours, context, lambda: "nothing", isolated=False)
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
    with pytest.raises(SandboxFault, match="a console died at its start: nothing"):
        asyncio.run(born_too_late())


async def refused_as_time_ran_out() -> None:
    """The process says why it ends in the moment in which its time is over, and the loop learns of both at once."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    door = SpawnSocket(ours, context, lambda: "nothing", isolated=False)
    limits = Limits(cpu_s=1)
    asked = asyncio.create_task(door.prepare_workspace(Workspace(lines=("while True: pass",)), limits, uid=0))
    _, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, theirs, 1 << 16, 3)
    console, channel = (socket.socket(fileno=descriptor) for descriptor in descriptors[:2])
    os.close(descriptors[2])
    with console, ours, theirs:
        process, folder = os.pidfd_open(os.getpid()), os.open("/", os.O_PATH)
        born = asyncio.get_running_loop().time()
        socket.send_fds(console, [b"B"], [process, folder])

        def refuse() -> None:
            with channel:
                said = {"place": "line 1", "value": "while True: pass", "problem": "it took too long"}
                channel.send(json.dumps(said).encode())
            while time.monotonic() < born + limits.cpu_s + 0.5:  # the loop stands still until the time is over
                pass

        asyncio.get_running_loop().call_later(limits.cpu_s / 2, refuse)
        await asyncio.wait({asked})
        context.destroy()
        os.close(process)
        os.close(folder)
        await asked


def test_what_a_process_says_of_its_workspace_is_not_lost_as_its_time_runs_out() -> None:
    with pytest.raises(SetupError, match="line 1 is 'while True: pass'; it took too long"):
        asyncio.run(refused_as_time_ran_out())

"""Real Jupyter servers from PyPI, on the loopback interface, with kernels of theirs and of ours."""

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from repl_rl.sandbox import jupyter_kernelspec as jupyter
from repl_rl.sandbox.jupyter_gateway.gateway_address import TOKEN, URL

SERVER, KERNEL_GATEWAY = "jupyter_server", "kernel_gateway"
STOCK, OURS, SEALED = "python3", "ours", "sealed"
"""Kernels that each has: ipykernel's own, ours as an ordinary process, ours inside bubblewrap."""
_READY = {SERVER: "is running at", KERNEL_GATEWAY: "is available at"}


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    process: subprocess.Popen[str]
    url: str
    token: str
    scratch: Path
    """Its temporary folder."""

    def variables(self, kernel: str = STOCK) -> dict[str, str]:
        """What names it, and one of its kernels, to the sandbox `gateway`."""
        return {URL: f"{self.url}#{kernel}", TOKEN: self.token}

    @contextmanager
    def named(self, kernel: str = STOCK) -> Iterator[None]:
        """A block in which it is the server of the sandbox `gateway`."""
        with pytest.MonkeyPatch.context() as environment:
            for name, value in self.variables(kernel).items():
                environment.setenv(name, value)
            yield

    def kernels(self) -> list[dict[str, object]]:
        """Those that it says it runs."""
        request = urllib.request.Request(f"{self.url}/api/kernels", headers={"Authorization": f"token {self.token}"})
        with urllib.request.urlopen(request, timeout=30) as response:
            found: list[dict[str, object]] = json.load(response)
        return found


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def _command(program: str, folder: Path, port: int, token: str) -> list[str]:
    if program == KERNEL_GATEWAY:
        flags = [f"--KernelGatewayApp.port={port}", f"--KernelGatewayApp.auth_token={token}"]
        flags.append("--JupyterWebsocketPersonality.list_kernels=True")  # for `Server.kernels`; ours asks for no list
        return [sys.executable, "-m", program, "--KernelGatewayApp.ip=127.0.0.1", *flags]
    flags = [f"--ServerApp.port={port}", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}"]
    return [sys.executable, "-m", program, "--ServerApp.open_browser=False", "--allow-root", *flags]


@contextmanager
def server(folder: Path, program: str = SERVER, port: int = 0, token: str = "") -> Iterator[Server]:
    """A server with all three kernels, in a folder of its own. What it starts ends with it."""
    port, token = port or free_port(), token or secrets.token_hex(8)
    scratch = folder / "tmp"
    scratch.mkdir(exist_ok=True)
    jupyter.install_kernelspec(folder / "data", name=OURS, isolated=False)
    jupyter.install_kernelspec(folder / "data", name=SEALED)
    mine = {name: value for name, value in os.environ.items() if name not in (URL, TOKEN)}  # else it would pass on
    environment = {**mine, "TMPDIR": str(scratch)}
    for kind in ("CONFIG", "DATA", "RUNTIME"):
        environment[f"JUPYTER_{kind}_DIR"] = str(folder / kind.lower())
    # A kernel that was installed into the environment of the tests is none of theirs.
    allowed = [f"--KernelSpecManager.allowed_kernelspecs={name}" for name in (STOCK, OURS, SEALED)]
    command = [*_command(program, folder, port, token), *allowed]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, cwd=folder) as process:
        try:
            assert process.stderr is not None
            assert any(_READY[program] in line for line in process.stderr), "it ended"
            threading.Thread(target=process.stderr.read, daemon=True).start()  # or it would wait for a reader
            yield Server(process, f"http://127.0.0.1:{port}", token, scratch)
        finally:
            process.terminate()

"""Sandbox of consoles on one Jupyter server, leased from a pool."""

import asyncio
import base64
import io
import json
import logging
import zipfile
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache, partial

from repl_rl.errors import SandboxFault, SandboxLost, SandboxUnavailable
from repl_rl.machine.assets import asset
from repl_rl.record.setup import Setup
from repl_rl.sandbox.base import Births
from repl_rl.sandbox.gateway.address import TOKEN, URL, Address
from repl_rl.sandbox.gateway.kernels import Answer, Kernels
from repl_rl.sandbox.gateway.link import KernelDied, KernelLink
from repl_rl.sandbox.gateway.session import ASK, GatewaySession
from repl_rl.sandbox.jupyter import NAME
from repl_rl.sandbox.local import ENVIRONMENT
from repl_rl.sandbox.pool import Pool
from repl_rl.sandbox.served import PATIENCE_S

log = logging.getLogger(__name__)
_THREADS = 1024
"""Maximum lines that run at once. Each waits in a thread."""
_SET_UP_S = 60.0


@cache
def _package() -> str:
    """Return the kernel's package as a base64-encoded zip file."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as package:
        for path in sorted(asset("sandbox/repl_kernel").iterdir()):
            if path.suffix in (".py", ".json"):
                package.write(path, f"repl_kernel/{path.name}")
    return base64.b64encode(packed.getvalue()).decode()


def _set_up(preload: Sequence[str]) -> str:
    """Return the set-up cell. It defines a function that sends requests to the relay."""
    variables = {name: value for name, value in ENVIRONMENT.items() if name != "PATH"}
    options = json.dumps({"isolate": False, "preload": list(preload)})
    cell = asset("sandbox/gateway_cell.py").read_text()
    return f"{cell}\n{ASK} = _repl_open({_package()!r}, {variables!r}, {options!r})"


def _mute(prompt: str) -> str:
    return ""


class _Source:
    """Source of consoles: one kernel of the server per console."""

    def __init__(self, kernels: Kernels, address: Address, births: Births) -> None:
        self.kernel = address.kernel
        """Name of the kernel to start. Empty means the server's default."""
        self.threads = ThreadPoolExecutor(_THREADS, "gateway")
        self._kernels, self._address, self._births = kernels, address, births
        self._cell = _set_up(births.preload)

    async def open(self) -> GatewaySession:
        """Start a fresh console. If the server is away, retry for a while.

        Raises:
            SandboxFault: no console could be started.
            SandboxLost: the server is gone.
        """
        for pause_s in PATIENCE_S:
            try:
                return await self.opened()
            except SandboxLost as lost:
                log.warning("no console can be started (%s); the next try is in %g s", lost, pause_s)
                await asyncio.sleep(pause_s)
        return await self.opened()

    async def opened(self) -> GatewaySession:
        """As `open`, but without retries."""
        kernel_id = await self._kernels.start(self.kernel)
        link = KernelLink(self._address, kernel_id)
        let_go = partial(self._kernels.end, kernel_id)
        session = GatewaySession(link, self.threads, self._births.limits, let_go)
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self.threads, link.connect)
            # The set-up cell starts the relay, which then starts the console.
            set_up = partial(link.ask, self._cell, f"callable({ASK})", _SET_UP_S, _mute)
            await loop.run_in_executor(self.threads, set_up)
            await session.begin()
        except KernelDied:
            session.close()
            raise SandboxFault("a kernel died before its console was born") from None
        except BaseException:
            session.close()
            raise
        return session


class GatewaySandbox:
    """Sandbox that leases consoles from a pool."""

    name = "gateway"

    def __init__(self, python_version: tuple[int, int, int], pool: Pool[GatewaySession]) -> None:
        self.python_version = python_version
        self._pool = pool

    def session(self) -> AbstractAsyncContextManager[GatewaySession]:
        """As `Sandbox.session`."""
        return self._pool.lease()

    @asynccontextmanager
    async def prepared(self, setup: Setup) -> AsyncIterator[GatewaySession]:
        """As `Preparing.prepared`. The workspace is made anew for each console."""
        async with self._pool.lease() as session:
            await session.begin(setup)
            yield session


def _unavailable(problem: str, remedy: str) -> SandboxUnavailable:
    return SandboxUnavailable(f"sandbox 'gateway': {problem}; {remedy}")


def _kernel(answer: Answer, address: Address) -> str:
    """Return the name of the kernel to start, after a check of the server's list. Empty means the server's default.

    Raises:
        SandboxUnavailable: this is no Jupyter server, it rejects the token, or it does not have this kernel.
    """
    if answer.status == 0:
        raise _unavailable(f"{address.url} cannot be reached ({answer.error})", f"start the server, or correct {URL}")
    if answer.refuses:
        raise _unavailable(f"{address.url} does not take the token (status {answer.status})", f"put it into {TOKEN}")
    specs = answer.said.get("kernelspecs") if isinstance(answer.said, Mapping) else None
    if not isinstance(specs, Mapping):
        said = f"status {answer.status} for its kernels: {answer.error or 'no list'}"
        raise _unavailable(f"{address.url} is no Jupyter server ({said})", f"correct {URL}")
    if address.kernel and address.kernel not in specs:
        remedy = f"name one of {', '.join(sorted(specs)) or '(none)'} behind the # of {URL}, or none"
        raise _unavailable(f"{address.url} has no kernel {address.kernel!r}", remedy)
    return address.kernel or (NAME if NAME in specs else "")


@asynccontextmanager
async def serve(address: Address, births: Births) -> AsyncIterator[GatewaySandbox]:
    """Serve consoles from a pool of a server's kernels for the duration of the context.

    Raises:
        SandboxUnavailable: the server cannot be used, or none of its kernels can run a console.
    """
    kernels = await Kernels.on(address)
    source = _Source(kernels, address, births)
    pool = Pool(source.open, warm=births.warm, starting=births.starting)
    try:
        source.kernel = _kernel(await kernels.specs(), address)
        try:
            # Open one console now, so that an unusable kernel is an error here and not in a rollout.
            first = await source.opened()
        except SandboxFault as fault:
            remedy = f"name a Python kernel with ipykernel on Linux behind the # of {URL}"
            raise _unavailable(f"no console can be had at {address.url}: {fault}", remedy) from fault
        version = first.python_version
        if births.warm:
            pool.offer(first)
        else:
            first.close()
        pool.fill()
        yield GatewaySandbox(version, pool)
    finally:
        await pool.close()
        await kernels.close()
        await asyncio.to_thread(source.threads.shutdown)

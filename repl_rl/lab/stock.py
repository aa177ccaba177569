"""Baseline of `bench sandbox`: plain `jupyter_client` with the stock ipykernel, used as documented."""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

_READY_S = 60.0
_HISTORY_OFF = ("--HistoryManager.enabled=False",)


@dataclass(frozen=True, slots=True)
class StockConsole:
    """Running stock kernel with its client."""

    manager: AsyncKernelManager
    client: AsyncKernelClient
    resources: AsyncExitStack
    """Resources to close: process, channels, sockets."""

    @property
    def pid(self) -> int:
        """Process id of the kernel."""
        provisioner = self.manager.provisioner
        assert isinstance(provisioner, LocalProvisioner)
        assert provisioner.process is not None
        return provisioner.process.pid

    async def line(self, code: str) -> float:
        """Run one line; return the seconds until it is done."""
        started = time.perf_counter()
        await self.client.execute_interactive(code, output_hook=lambda _: None)
        return time.perf_counter() - started

    async def close(self) -> None:
        """Kill the kernel and close its channels."""
        await self.resources.aclose()


async def open_stock(*, history: bool = True) -> StockConsole:
    """Start a kernel and wait until it is ready. With `history` it writes its history to disk, which is the default.

    Raises:
        RuntimeError: it died before it was ready.
        TimeoutError: it was not ready within a minute.
    """
    async with AsyncExitStack() as undo:
        # jupyter_client picks free TCP ports and releases them before the kernel binds them. Of several kernels that
        # start together, two may get the same port, and one client blocks forever. Unix sockets cannot collide.
        folder = Path(undo.enter_context(TemporaryDirectory(prefix="stock-")))
        manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=str(folder / "kernel"))
        undo.push_async_callback(manager.shutdown_kernel, now=True)
        options = [] if history else list(_HISTORY_OFF)
        with (folder / "said").open("wb") as said:
            await manager.start_kernel(extra_arguments=options, stdout=said, stderr=said)
        client = manager.client()
        assert isinstance(client, AsyncKernelClient)
        # From here the client must be stopped before the kernel is killed.
        client.start_channels()
        undo.callback(client.stop_channels)
        try:
            async with asyncio.timeout(_READY_S):
                await client.wait_for_ready()
        except RuntimeError as error:
            last_words = (folder / "said").read_text("utf-8", "replace")[-1000:].strip() or "it said nothing"
            raise RuntimeError(f"a stock kernel died at its birth: {last_words}") from error
        return StockConsole(manager, client, undo.pop_all())

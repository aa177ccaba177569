"""Plain `jupyter_client` with the stock ipykernel, as its documentation uses it: what `bench sandbox` compares with."""

import asyncio
import time
from dataclasses import dataclass

from jupyter_client.manager import AsyncKernelManager

_READY_S = 60.0
_HISTORY_OFF = ("--HistoryManager.enabled=False",)


@dataclass(frozen=True, slots=True)
class StockConsole:
    """One running stock kernel with its client."""

    manager: AsyncKernelManager
    client: object

    @property
    def pid(self) -> int:
        """Of the kernel's process."""
        return int(self.manager.provisioner.process.pid)  # type: ignore[union-attr]

    async def line(self, code: str) -> float:
        """Run one line; seconds until it is done."""
        started = time.perf_counter()
        await self.client.execute_interactive(code, output_hook=lambda _: None)  # type: ignore[attr-defined]
        return time.perf_counter() - started

    async def close(self) -> None:
        """Kill it."""
        self.client.stop_channels()  # type: ignore[attr-defined]
        await self.manager.shutdown_kernel(now=True)


async def open_stock(*, history: bool = True) -> StockConsole:
    """Start a kernel and wait until it is ready. `history`: it writes its history to disk, as it does by default."""
    manager = AsyncKernelManager(kernel_name="python3")
    silent = asyncio.subprocess.DEVNULL
    await manager.start_kernel(extra_arguments=[] if history else list(_HISTORY_OFF), stdout=silent, stderr=silent)
    client = manager.client()
    client.start_channels()
    async with asyncio.timeout(_READY_S):
        await client.wait_for_ready()
    return StockConsole(manager, client)

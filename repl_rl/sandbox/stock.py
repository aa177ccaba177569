"""Plain `jupyter_client` with the stock ipykernel, as its documentation uses it: what `bench sandbox` compares with."""

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from tempfile import TemporaryFile

from jupyter_client.manager import AsyncKernelManager

log = logging.getLogger(__name__)

_READY_S = 60.0
_BIRTHS = 3
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
    """Start a kernel and wait until it is ready. `history`: it writes its history to disk, as it does by default.

    jupyter_client chooses the ports and lets go of them before the kernel takes them, so a kernel can be born to find
    one taken. Such a birth has no state; it is said in the log and tried again.

    Raises:
        RuntimeError: it died at its birth, time after time.
    """
    for _ in range(_BIRTHS - 1):
        try:
            return await _born(history=history)
        except RuntimeError as error:
            log.warning("%s; starting another", error)
    return await _born(history=history)


async def _born(*, history: bool) -> StockConsole:
    manager = AsyncKernelManager(kernel_name="python3")
    async with AsyncExitStack() as undo:
        undo.push_async_callback(manager.shutdown_kernel, now=True)
        with TemporaryFile() as said:
            await manager.start_kernel(extra_arguments=[] if history else list(_HISTORY_OFF), stdout=said, stderr=said)
            client = manager.client()
            client.start_channels()
            undo.callback(client.stop_channels)
            try:
                async with asyncio.timeout(_READY_S):
                    await client.wait_for_ready()
            except RuntimeError as error:
                said.seek(0)
                last_words = said.read()[-1000:].decode("utf-8", "replace").strip() or "it said nothing"
                raise RuntimeError(f"a stock kernel died at its birth: {last_words}") from error
        undo.pop_all()
    return StockConsole(manager, client)

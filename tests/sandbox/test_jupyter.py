"""Any Jupyter client can open our console: through its kernelspec, isolated by its provisioner or not."""

import asyncio
import json
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase

from repl_rl.sandbox import jupyter


class _Factory(KernelProvisionerFactory):
    """Knows our provisioner without an installed entry point."""

    def _get_provisioner_class(self) -> type[jupyter.BubblewrapProvisioner]:
        return jupyter.BubblewrapProvisioner

    def create_provisioner_instance(self, kernel_id: str, kernel_spec: object, parent: object) -> KernelProvisionerBase:
        return jupyter.BubblewrapProvisioner(kernel_id=kernel_id, kernel_spec=kernel_spec, parent=parent)

    def is_provisioner_available(self, kernel_spec: object) -> bool:
        return True


async def _outputs(manager: AsyncKernelManager, *cells: str) -> list[tuple[str, str]]:
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    found = []
    try:
        async with asyncio.timeout(60):
            await client.wait_for_ready()
            for cell in cells:
                texts: list[str] = []
                reply = await client.execute_interactive(
                    cell, output_hook=lambda message, texts=texts: texts.append(message["content"].get("text", ""))
                )
                found.append((reply["content"]["status"], "".join(texts)))
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
    return found


CELLS = (
    "x = 20\nfor i in range(2):\n    i",
    "x + 1",
    "1/0",
    "import os; os.listdir('/home') if os.path.isdir('/home') else []",
)


@pytest.mark.parametrize("isolated", [False, True])
def test_a_jupyter_client_runs_cells_in_our_console(
    tmp_path: Path, isolated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = jupyter.install(tmp_path, isolated=isolated)
    assert json.loads((folder / "kernel.json").read_text())["language"] == "python"
    if isolated:
        factory = _Factory()
        monkeypatch.setattr(KernelProvisionerFactory, "instance", classmethod(lambda cls, **_: factory))

    async def main() -> list[tuple[str, str]]:
        specs = KernelSpecManager(kernel_dirs=[str(folder.parent)])
        return await _outputs(AsyncKernelManager(kernel_name=jupyter.NAME, kernel_spec_manager=specs), *CELLS)

    found = asyncio.run(main())
    assert found[:2] == [("ok", "0\n1\n"), ("ok", "21\n")]
    assert found[2][0] == "error"
    assert found[2][1].endswith("ZeroDivisionError: division by zero\n")
    if isolated:
        assert found[3] == ("ok", "[]\n")

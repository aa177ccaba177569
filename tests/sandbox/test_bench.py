"""The bench measures what it says, with small numbers; how good the figures are is not a test's business."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from repl_rl.sandbox.bench import Effort, run_bench
from repl_rl.sandbox.stock import open_stock


@pytest.mark.heavy
def test_the_bench_reports_every_ratio_and_the_raw_figures_beside_it() -> None:
    report = run_bench(Effort(checkouts=2, lines=12, many=8, rollouts=8))
    ratios = report["ratios"]
    assert isinstance(ratios, dict)
    assert set(ratios) == {"checkout", "line", "line_error", "lines_16", "rollouts", "memory"}
    assert all(value > 0 for value in ratios.values())
    assert set(report) >= {"ratios_history_off", "checkout", "lines", "lines_16_per_s", "rollouts_per_s", "memory_mib"}


def _kernel_that_dies(folder: Path, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a kernelspec of the stock kernel's name first on Jupyter's path, whose first `times` births fail."""
    launch = f"""
import os, runpy, sys
births = len(os.listdir({str(folder / "births")!r}))
open(os.path.join({str(folder / "births")!r}, str(births)), "w").close()
if births < {times}:
    sys.exit("address in use")
runpy.run_module("ipykernel_launcher", run_name="__main__")
"""
    (folder / "births").mkdir()
    spec = folder / "kernels" / "python3"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-c", launch, "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "dies", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(folder))


async def _one_line() -> float:
    console = await open_stock()
    try:
        return await console.line("1 + 1")
    finally:
        await console.close()


def test_a_stock_kernel_that_dies_at_its_birth_is_said_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _kernel_that_dies(tmp_path, 1, monkeypatch)
    assert asyncio.run(_one_line()) > 0
    assert "address in use; starting another" in caplog.text


def test_a_stock_kernel_that_always_dies_at_its_birth_ends_the_bench_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _kernel_that_dies(tmp_path, 9, monkeypatch)
    with pytest.raises(RuntimeError, match="address in use"):
        asyncio.run(_one_line())

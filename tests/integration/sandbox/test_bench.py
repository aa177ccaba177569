"""The bench measures what it says, with small numbers; how good the figures are is not a test's business."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from benchmarks.console.line_latency import SandboxEffort, bench_sandbox, open_stock


@pytest.mark.heavy
def test_the_bench_reports_every_ratio_and_the_raw_figures_beside_it() -> None:
    report = bench_sandbox(SandboxEffort(checkouts=2, lines=12, many=8, rollouts=8))
    ratios = report["ratios"]
    assert isinstance(ratios, dict)
    assert set(ratios) == {"checkout", "line", "line_error", "lines_16", "rollouts", "memory"}
    assert all(value > 0 for value in ratios.values())
    assert set(report) >= {"ratios_history_off", "checkout", "lines", "lines_16_per_s", "rollouts_per_s", "memory_mib"}


async def _one_line() -> float:
    console = await open_stock()
    try:
        return await console.line("1 + 1")
    finally:
        await console.close()


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_a_stock_kernel_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = _children()  # an engine of another test may live as long as this process
    assert asyncio.run(_one_line()) > 0
    assert list(tmp_path.iterdir()) == []
    assert _children() <= before


def test_a_stock_kernel_that_dies_at_its_birth_ends_the_bench_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "kernels" / "python3"  # first on Jupyter's path
    spec.mkdir(parents=True)
    argv = [sys.executable, "-c", "import sys; sys.exit('no room')", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "dies", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="no room"):
        asyncio.run(_one_line())

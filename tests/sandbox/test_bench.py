"""The bench measures what it says, with small numbers; how good the figures are is not a test's business."""

import pytest

from repl_rl.sandbox.bench import Effort, run_bench


@pytest.mark.heavy
def test_the_bench_reports_every_ratio_and_the_raw_figures_beside_it() -> None:
    report = run_bench(Effort(checkouts=2, lines=12, many=8, rollouts=8))
    ratios = report["ratios"]
    assert isinstance(ratios, dict)
    assert set(ratios) == {"checkout", "line", "line_error", "lines_16", "rollouts", "memory"}
    assert all(value > 0 for value in ratios.values())
    assert set(report) >= {"ratios_history_off", "checkout", "lines", "lines_16_per_s", "rollouts_per_s", "memory_mib"}

"""The block about the age of rollouts: it is that of the published figures, and its numbers come from them."""

from dataclasses import asdict

from benchmarks.stale import PAGE, REGIMES, block, published
from repl_rl.lab.credit.conditions import BASELINE
from repl_rl.lab.credit.rows import Run
from repl_rl.lab.credit.statistics import aggregate


def run(condition: str, seed: int, solve: float, staleness: float, kept: float) -> Run:
    rates = [0.2, solve + seed / 1000]
    after = {"solve_rate": solve, "line_error_rate": 0.1}
    return Run(condition, seed, [50, 100], rates, [0.0] * 2, [2.0] * 2, after, 0.0, 1.0, 1.0, 2.0,
               staleness=staleness, kept=kept)  # fmt: skip


def report(regime: str) -> dict[str, object]:
    runs = [run(BASELINE, n, 0.9, 0.0, 1.0) for n in range(3)]
    runs += [run("ahead_1/token_truncate", n, 0.9 + (n - 1) / 100, 1.0, 0.99) for n in range(3)]
    runs += [run("ahead_8/line_truncate", n, 0.4, 7.5, 0.81) for n in range(3)]
    settings = {
        "regime": regime, "tokens": 100, "learning_rate": 5e-4, "rates": (), "prompts_per_step": 8, "group_size": 8,
        "start": "bundled", "engine": "vllm",
    }  # fmt: skip
    return {
        "settings": settings, "seeds": 3, "workers": 1, "cores": 2, "busy_s": 60.0, "tuning_s": 0.0, "policy": "p",
        "versions": {"torch": "2"}, "figures": aggregate(runs, [], 100),
        "rows": [{"kind": "run", **asdict(one)} for one in runs],
    }  # fmt: skip


def test_the_block_of_the_page_is_that_of_the_published_figures() -> None:
    assert PAGE.text == block(published())


def test_what_was_not_played_is_said_to_be_planned() -> None:
    assert block({}).count("Not played yet.") == len(REGIMES)


def test_a_condition_has_its_age_its_share_and_its_difference_to_fresh_rollouts() -> None:
    text = block({"stale": report("stale")})
    (row,) = [line for line in text.splitlines() if line.startswith("| `ahead_8/line_truncate` |")]
    assert row.startswith("| `ahead_8/line_truncate` | 7.50 steps | 81.0% |")
    assert row.endswith("| 40.0% (40.0% to 40.0%) | -50.0 (-50.0 to -50.0) |")
    assert f"| `{BASELINE}` | 0.00 steps | 100.0% |" in text
    assert "Of 2 conditions 1 (`ahead_8/line_truncate`) below fresh rollouts and none above, over the budget" in text
    assert "held-out tasks, 1 (`ahead_8/line_truncate`) below and none above by an interval" in text
    assert text.count("Not played yet.") == 1

"""Policies that farm, played for real: no line of theirs is worth more than an honest one's of equal outcome."""

import asyncio
from collections.abc import Sequence
from statistics import fmean

import pytest

from repl_rl.credit.advantage_estimators import ESTIMATORS
from repl_rl.credit.credit_metrics import compute_credit_metrics, compute_shaping_metrics
from repl_rl.credit.rewards import build_group_entry, compute_group_advantages
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.trl_arguments import build_credit_config
from repl_rl.trajectory.trajectory import Group, Stop, Trajectory
from repl_rl.trajectory.trajectory_metrics import compute_trajectory_metrics
from tests.support.scripted_rollouts import TASK, world

HONEST = ["x = 6 * 7\n", "x\n", "submit_final_answer({answer})\n"]
FARMS = {
    "prints": ["print('working')\n", "x = 6 * 7\n", "print(x)\n", "print(x)\n", "print('done')\n",
               "submit_final_answer({answer})\n"],
    "trivial lines": ["\n", "# think\n", "pass\n", "0\n", "1\n", "x = 6 * 7\n", "submit_final_answer({answer})\n"],
    "try/except": ["try:\n", "  x = 6 * 7\n", "except Exception:\n", "  pass\n", "\n",
                   "submit_final_answer({answer})\n"],
}  # fmt: skip
INDICATORS = {"prints": "print_spam_rate", "trivial lines": "void_line_rate", "try/except": "try_rate"}
MATES = (["6 *\n", "submit_final_answer(0)\n"], ["1 / 0\n", "submit_final_answer(42)\n"])
"""Two more rollouts of the group, an error in each."""


def played(lines: Sequence[str], answer: str = "") -> Trajectory:
    (trajectory,) = asyncio.run(world([line.format(answer=answer) for line in lines]).collect([TASK]))
    assert trajectory.stop is Stop.ANSWERED
    return trajectory


def advantages(group: Sequence[Trajectory], estimator: str) -> list[tuple[float, ...]]:
    credit = build_credit_config(TrainerConfig(estimator=estimator))
    earned = tuple(build_group_entry(t, credit) for t in group)
    return list(compute_group_advantages(Group(earned), credit))


def mean_of_tokens(t: Trajectory, advantages_L: Sequence[float]) -> float:
    return fmean(a for a, line in zip(advantages_L, t.lines, strict=True) for _ in line.token_ids)


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
@pytest.mark.parametrize("answer", ["42", "41"])
@pytest.mark.parametrize("farm", FARMS)
def test_farming_gains_nothing_over_an_honest_rollout_of_equal_outcome(farm: str, answer: str, estimator: str) -> None:
    honest, farmed = played(HONEST, answer), played(FARMS[farm], answer)
    assert honest.outcome == farmed.outcome == float(answer == "42")
    assert len(farmed.lines) > len(honest.lines)
    mine, theirs, *_ = advantages([honest, farmed, *map(played, MATES)], estimator)
    assert max(theirs) <= max(mine) + 1e-6, "no line of the farm is worth more than the best honest one"
    if estimator != "state_anchor" or answer == "42":
        assert mean_of_tokens(farmed, theirs) <= mean_of_tokens(honest, mine) + 1e-6


@pytest.mark.parametrize("farm", FARMS)
def test_farming_shows_in_the_indicators(farm: str) -> None:
    honest, farmed = (
        compute_trajectory_metrics([played(HONEST, "42")]),
        compute_trajectory_metrics([played(FARMS[farm], "42")]),
    )
    assert honest[INDICATORS[farm]] == 0.0
    assert farmed[INDICATORS[farm]] >= 1 / 3


def test_print_spam_is_printing_what_was_printed_or_what_computes_nothing() -> None:
    lines = ["y = 'a'\n", "print(y)\n", "print(y, 1)\n", "print(y)\n", "print('a', 2)\n", "submit_final_answer(1)\n"]
    figures = compute_trajectory_metrics([played(lines)])
    assert figures["print_rate"] == pytest.approx(4 / 6)
    assert figures["print_spam_rate"] == pytest.approx(2 / 6), "the repeated print, and that of literals"


@pytest.mark.parametrize(
    ("line", "share"),
    [
        ("f = sys._getframe()\n", 1.0),
        ("import os, gc\n", 1.0),
        ("from inspect import stack\n", 1.0),
        ("sys.modules['__main__']\n", 1.0),
        ("__builtins__\n", 1.0),
        ("e.__traceback__.tb_frame\n", 1.0),
        ("gc_content = 3\n", 0.0),
        ("import sys\n", 0.0),
        ("inspection = 1\n", 0.0),
    ],
)
def test_rollouts_that_name_frames_gc_or_builtins_are_counted(line: str, share: float) -> None:
    assert compute_trajectory_metrics([played([line, "submit_final_answer(1)\n"])])["introspection_rate"] == share
    assert (
        compute_trajectory_metrics([played([f"submit_final_answer({line.strip()!r})\n"])])["introspection_rate"]
        == share
    )


def test_paid_shaping_shows_as_a_share_of_the_return_and_as_its_correlation_with_the_outcome() -> None:
    credit = build_credit_config(TrainerConfig())
    group = [played(HONEST, "42"), played(HONEST, "41"), *map(played, MATES)]
    metrics = compute_shaping_metrics([build_group_entry(t, credit) for t in group])
    assert metrics["shaping_mean"] == pytest.approx(-0.2 / 4)
    assert metrics["shaping_share"] == pytest.approx(0.2 / (0.2 + 2.0))
    assert metrics["shaping_correlation"] == pytest.approx(0.0), "one error solved, one did not"


@pytest.mark.parametrize(("estimator", "bitten"), [("process", 1 / 2), ("return_to_go", 1 / 2), ("two_stream", 0.0)])
def test_how_often_the_bound_bit_is_told_where_shaping_is_added_up(estimator: str, bitten: float) -> None:
    credit = build_credit_config(TrainerConfig(estimator=estimator))
    errors = [["1 / 0\n"] * count + ["submit_final_answer(42)\n"] for count in (5, 6)]
    earned = [build_group_entry(played(lines), credit) for lines in errors]
    assert compute_credit_metrics(earned, credit)["bound_rate"] == bitten


def test_errors_cost_no_more_than_the_tables_bound_where_shaping_is_added_up() -> None:
    once, often = (
        played(["1 / 0\n", "submit_final_answer(42)\n"]),
        played(["1 / 0\n"] * 6 + ["submit_final_answer(42)\n"]),
    )
    mine, theirs = advantages([once, often], "return_to_go")
    assert mine[0] == pytest.approx(-0.1)
    assert theirs[0] == pytest.approx(-TrainerConfig().rewards.bound)

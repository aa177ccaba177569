"""The bench plays what it says, with small numbers; how good the figures are is not a test's business."""

import asyncio

import pytest

from benchmarks.rollouts.forced_lengths import LONGEST, SHORTEST, ForcedRenderer, Plan, TimedEngine
from benchmarks.rollouts.throughput import many
from repl_rl.engine import ScriptedEngine
from repl_rl.rollout import ReplSampler, Rollouts, RolloutSettings
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.sandbox import InProcessSandbox
from repl_rl.trajectory.trajectory import LineStatus
from repl_rl.utils.package_data import find_asset
from tests.support.scripted_rollouts import TASK

QUICKSTART = find_asset("policies/quickstart")


def test_forced_lines_have_the_lengths_of_the_plan_and_run() -> None:
    plan = Plan(rollouts=6, lines=5)
    engine = TimedEngine(ScriptedEngine.from_policy(lambda ids: [sum(ids) % 350]), plan.lengths())
    limits = RolloutLimits(max_lines=plan.lines)
    renderer, settings = ForcedRenderer(QUICKSTART, plan), RolloutSettings("bare", concurrency=6)
    rollouts = Rollouts(engine, InProcessSandbox(), renderer, ReplSampler(), limits, settings)
    played = asyncio.run(rollouts.collect([TASK] * 6))
    assert [[len(line.token_ids) for line in t.lines] for t in played] == plan.lengths()
    assert {execution.status for t in played for execution in t.executions} == {LineStatus.OK}
    assert engine.engine_s > 0


def test_observations_have_ten_tokens_in_the_mean_as_those_that_were_known_beforehand() -> None:
    plan = Plan(rollouts=64, lines=16)
    renderer = ForcedRenderer(QUICKSTART, plan)
    known = [len(renderer.encode(text)) for texts in plan.known() for text in texts]
    assert 9 <= sum(known) / len(known) <= 12
    printed = [renderer.decode((i, i + 1)).startswith("print") for i in range(300)]
    assert 0.4 < sum(printed) / 300 < 0.6
    lengths = [length for row in plan.lengths() for length in row]
    assert SHORTEST <= min(lengths) <= max(lengths) <= LONGEST
    assert 13 <= sum(lengths) / len(lengths) <= 15


def test_figures_of_few_and_many_rollouts_are_about_the_same_lines() -> None:
    figures = asyncio.run(many(few=4, most=16))
    assert (figures["few"], figures["many"]) == (4, 16)
    assert figures["few_host_ms"] > 0
    assert figures["ratio"] == pytest.approx(figures["many_host_ms"] / figures["few_host_ms"])
    assert 0 < figures["rollout_kib"] < 10_000


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_bench_reports_every_way_a_reason_for_each_null_and_a_profile() -> None:
    from benchmarks.rollouts.throughput import KEYS, RolloutEffort, bench_rollout

    report = bench_rollout(RolloutEffort(rollouts=8, lines=3, repeats={"small": 1}))
    small, bundled = report["small"], report["bundled"]
    assert isinstance(small, dict)
    assert isinstance(bundled, dict)
    for key in KEYS:
        assert small[key] or small["reasons"][key]
        assert key == "ours" or small["ratios"].get(key, 0) > 0 or small[key] is None
    assert set(small["profile"]) == {
        *("engine_ms", "kernel_ms", "queue_ms", "splice_ms", "host_ms", "vllm_host_ms", "own_host_ms"),
        "engine_share",
    }
    assert small["fallback"] is None
    assert set(small["stock"]) == {"request_a_line", "lockstep", "text_loop", "block_size", "ratios"}
    assert all(ratio > 0 for ratio in small["stock"]["ratios"].values())
    assert bundled["ours"] > 0
    assert 0 < bundled["profile"]["engine_share"] < 1

"""Training on real vLLM with host functions: rollouts that ask the policy and play rollouts, rows token by token."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from repl_rl.rollout import RolloutSampler
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.store import Store
from repl_rl.settings.function_tables import OptionTable
from repl_rl.trainer import grpo
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.logprobs import TokenColumns, build_token_columns
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import train
from repl_rl.trajectory.trajectory import Trajectory

pytest.importorskip("vllm")
ASKED = "try: a, b = llm_query('What is 17 + 25?'), rollout('What is 6 * 7?')"
HELD = ("except NameError: pass", "")


class Asking(RolloutSampler):
    """After the first line the console asks the policy and plays a rollout, which at its depth is not offered."""

    async def rollout(self, episode: Episode) -> None:
        line = await episode.sample()
        if episode.ended:
            return
        await episode.push(line)
        if not episode.ended:
            await episode.execute(ASKED, *HELD)
        async for line in episode.lines():
            await episode.push(line)


@dataclass
class Seen:
    """What the trainer was given, a step each."""

    rows: list[tuple[Sequence[Trajectory], TokenColumns]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)


def trained(out: Path, steps: int, functions: OptionTable) -> Seen:
    """Train the bundled policy on vLLM; the rows of each update are kept."""
    seen = Seen()

    def kept(rows: Sequence[Trajectory], pad_id: int) -> TokenColumns:
        made = build_token_columns(rows, pad_id)
        seen.rows.append((rows, made))
        return made

    def on_step(record: StepRecord, _: Sequence[Trajectory]) -> None:
        seen.gaps.append(record.metrics["logprob_gap_max"])

    world = RolloutConfig(
        sampler="tests.e2e.trainer.test_host_training:Asking",
        host_functions=functions,
        concurrency=3,
        rollout=RolloutLimits(max_lines=4),
    )
    # At the bundled rate it soon writes lines without end, after which nothing is asked.
    config = TrainerConfig(steps=steps, prompts_per_step=2, group_size=4, per_device_batch_size=4, learning_rate=1e-5)
    grpo.__dict__["build_token_columns"] = kept
    try:
        train(world, config, out=out, train_tasks=32, on_step=on_step)
    finally:
        grpo.__dict__["build_token_columns"] = build_token_columns
    return seen


def check(seen: Seen, *, queries: bool) -> tuple[int, int]:
    """Hold every token of every row to its segment; rows of children, and tokens that are trained."""
    children = tokens = 0
    kinds = set[str]()
    for rows, made in seen.rows:
        asked = {call.child for t in rows for run in t.executions for call in run.calls if call.trained}
        for t, ids, mask, prompt in zip(rows, made.completion_ids, made.mask, made.prompt_ids, strict=True):
            if not t.trainable:
                assert mask == [0]
                continue
            assert prompt == list(t.prompt.token_ids)
            expected = [(i, type(s).__name__ == "Sampled") for s in t.segments for i in s.token_ids]
            assert [(i, bool(m)) for i, m in zip(ids, mask, strict=True)] == expected
            tokens += sum(mask)
            if t.parent:
                children += 1
                assert t.id in asked
        kinds |= {t.id.rpartition("/")[2].partition("-")[0] for t in rows if t.parent}
    assert kinds == ({"query", "rollout"} if queries else {"rollout"})
    return children, tokens


@pytest.mark.heavy
@pytest.mark.parametrize("train_queries", [True, False])
def test_on_vllm_queries_and_child_rollouts_are_rows_of_the_update_or_masked(
    train_queries: bool, tmp_path: Path
) -> None:
    seen = trained(tmp_path / "run", 2, {"llm_query": {"train": train_queries, "max_tokens": 16}, "rollout": {}})
    children, tokens = check(seen, queries=train_queries)
    assert children > 0
    assert tokens > 0
    assert len(seen.gaps) == 2
    assert max(seen.gaps) <= 1e-3
    stored = [entry.trajectory for entry in Store(tmp_path / "run")]
    assert any(child.parent == t.id for t in stored for child in t.children)


def main(steps: int) -> None:
    """Print the figures of a longer run."""
    for train_queries in (True, False):
        with TemporaryDirectory() as folder:
            functions = {"llm_query": {"train": train_queries, "max_tokens": 16}, "rollout": {}}
            seen = trained(Path(folder) / "run", steps, functions)
            with_children = sum(any(t.parent for t in rows) for rows, _ in seen.rows)
            print(f"{with_children} of {len(seen.rows)} steps with children; {max(seen.gaps):.2e} nats", flush=True)
            children, tokens = check(seen, queries=train_queries)
            rows = sum(len(rows) for rows, _ in seen.rows)
            gap = max(seen.gaps)
            print(
                f"{functions}: {len(seen.gaps)} steps, {rows} rows, {children} of children, {tokens} tokens, {gap=:.2e}"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""The bundled policy on its own tasks: where a rollout's time goes, and whether sampling ahead pays."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from repl_rl.engine import Engine, open_engine
from repl_rl.lab.forced import TimedEngine, leased
from repl_rl.lab.profile import Stopwatch, profile, watched
from repl_rl.lab.ways import Played
from repl_rl.machine.assets import asset
from repl_rl.rollout import ReplSampler, Rollouts
from repl_rl.rollout.limits import RolloutLimits
from repl_rl.rollout.renderer import Renderer
from repl_rl.sandbox.base import Sandbox
from repl_rl.tasks import Split, Task, load_tasks


@dataclass(frozen=True, slots=True)
class Timed:
    """One pass over the tasks."""

    played: Played
    watch: Stopwatch

    @property
    def rate(self) -> float:
        """Sampled tokens a second."""
        return sum(trajectory.sampled_tokens for trajectory in self.played.trajectories) / self.watch.wall_s

    @property
    def wasted_share(self) -> float:
        """Sampled tokens that were taken back, as a share of all that were sampled."""
        kept = sum(trajectory.sampled_tokens for trajectory in self.played.trajectories)
        wasted = self.played.tally.wasted_tokens
        return wasted / (kept + wasted)


async def bundled(sandbox: Sandbox, rollouts: int, repeats: int) -> dict[str, object]:
    """Play as many tasks as `rollouts`, all at once, with sampling ahead off and on, interleaved."""
    folder = asset("policies/quickstart")
    tasks = load_tasks("builtin:quickstart", split=Split.TRAIN, count=rollouts, seed=0)
    off, on = ReplSampler(), ReplSampler(optimistic=True)
    runs: dict[ReplSampler, list[Timed]] = {off: [], on: []}
    renderer = Renderer.from_folder(folder)
    never = renderer.forbidden_ids
    async with open_engine("vllm", model=folder, max_sessions=rollouts, forbidden_ids=never) as engine:
        plain = Rollouts(engine, sandbox, renderer, off, RolloutLimits(), "bare", concurrency=rollouts)
        await _run(plain, tasks, engine)
        for _ in range(repeats):
            for sampler, found in runs.items():
                found.append(await _run(replace(plain, sampler=sampler), tasks, engine))
    rate = {sampler: statistics.median(run.rate for run in found) for sampler, found in runs.items()}
    return {
        "ours": rate[off],
        "optimistic": rate[on],
        "wasted_share": statistics.fmean(run.wasted_share for run in runs[on]),
        "kept_chunks": sum(run.played.tally.kept_chunks for run in runs[on]),
        "wasted_chunks": sum(run.played.tally.wasted_chunks for run in runs[on]),
        "profile": profile(runs[off][-1].played, runs[off][-1].watch),
    }


async def _run(rollouts: Rollouts, tasks: Sequence[Task], engine: Engine) -> Timed:
    timed = TimedEngine(engine)
    async with leased(rollouts.sandbox, len(tasks)) as consoles:
        fresh = replace(rollouts, engine=timed, sandbox=consoles, tally=type(rollouts.tally)())
        async with watched() as watch:
            trajectories = await fresh.collect(tasks)
    return Timed(Played(trajectories, timed.engine_s, fresh.tally), watch)

"""Profile of rollouts of the bundled policy on its own tasks."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from repl_rl.engine import Engine, open_engine
from repl_rl.lab.forced import TimedEngine, leased
from repl_rl.lab.profile import Stopwatch, profile, watched
from repl_rl.lab.ways import Played
from repl_rl.rollout import ReplSampler, Rollouts
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sandbox.base import Sandbox
from repl_rl.tasks import Split, Task, load_tasks
from repl_rl.utils.package_data import find_asset


@dataclass(frozen=True, slots=True)
class Timed:
    """One pass over the tasks."""

    played: Played
    watch: Stopwatch

    @property
    def rate(self) -> float:
        """Sampled tokens per second."""
        return sum(trajectory.sampled_tokens for trajectory in self.played.trajectories) / self.watch.wall_s


async def bundled(sandbox: Sandbox, rollouts: int, repeats: int) -> dict[str, object]:
    """Play as many tasks as `rollouts`, all at once, `repeats` (>= 1) times."""
    folder = find_asset("policies/quickstart")
    tasks = load_tasks("builtin:quickstart", split=Split.TRAIN, count=rollouts, seed=0)
    renderer = Renderer.from_folder(folder)
    never = renderer.forbidden_ids
    async with open_engine("vllm", model=folder, max_sessions=rollouts, forbidden_ids=never) as engine:
        ours = Rollouts(engine, sandbox, renderer, ReplSampler(), RolloutLimits(), "bare", concurrency=rollouts)
        # Warm up.
        await _run(ours, tasks, engine)
        runs = [await _run(ours, tasks, engine) for _ in range(repeats)]
    return {
        "ours": statistics.median(run.rate for run in runs),
        "profile": profile(runs[-1].played, runs[-1].watch),
    }


async def _run(rollouts: Rollouts, tasks: Sequence[Task], engine: Engine) -> Timed:
    timed = TimedEngine(engine)
    async with leased(rollouts.sandbox, len(tasks)) as consoles:
        fresh = replace(rollouts, engine=timed, sandbox=consoles)
        async with watched() as watch:
            trajectories = await fresh.collect(tasks)
    return Timed(Played(trajectories, timed.engine_s), watch)

"""Play bundled tasks with a custom sampler and print the transcripts.

    python examples/custom_sampler.py
    python examples/custom_sampler.py --sandbox unsafe    # without bubblewrap; isolates nothing

The sampler runs each line as soon as the policy has written it. It rewards an answer that comes after console output,
and ends a rollout after two errors in a row.

The script prints one transcript per rollout, with its outcome, its stop reason and its line rewards. The last line
has the sampler's own metric over all rollouts.
"""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from repl_rl import Episode, LineStatus, RolloutConfig, RolloutSampler, Trajectory, to_text


class LookFirst(RolloutSampler):
    """The line console, with a reward for answers that follow console output.

    One instance plays all rollouts concurrently. It holds options; the state of a rollout is a local variable.
    """

    def __init__(self, *, bonus: float = 0.1, most_errors: int = 2) -> None:
        """Take the options. On the command line they are flags, such as `--sampler.bonus 0.2`."""
        self.bonus = bonus
        self.most_errors = most_errors

    async def rollout(self, episode: Episode) -> None:
        """Drive one rollout until it ends."""
        has_output, errors = False, 0
        # Sample: each iteration waits until the policy has written one line. The loop ends with the rollout.
        async for line in episode.lines():
            # Execute: the console runs the line. Its output and the next prompt join the context as masked tokens.
            result = await episode.push(line)
            # Reward: the value goes to the line sampled last, and its name to the metrics.
            if result.status is LineStatus.ANSWERED and has_output:
                episode.reward(self.bonus, name="looked_first")
            has_output = has_output or (result.status is LineStatus.OK and result.text != "")
            # Stop: `finish` ends the rollout, and the loop with it.
            errors = errors + 1 if result.status.is_error else 0
            if errors == self.most_errors:
                episode.finish()

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Count the rewarded answers of a batch. In training this is a column of `metrics.jsonl`."""
        rewards = [reward for t in trajectories for line in t.lines for reward in line.rewards]
        return {"looked_first": float(sum(reward.name == "looked_first" for reward in rewards))}


async def play(sandbox: str, tasks: int, rollouts_per_task: int) -> None:
    """Play a few rollouts and print what happened."""
    # A world names the policy (here the bundled one), the engine that samples, and the sandbox that runs lines.
    world = RolloutConfig(engine="transformers", sandbox=sandbox, concurrency=4)
    # Of the bundled tasks, two families whose answers take a computation.
    chosen = [task for task in world.draw_tasks("train", 64) if task.family in ("variables", "chain")][:tasks]
    # `rollouts()` opens engine and consoles together, and closes them at the end of the block.
    async with world.open_rollouts() as rollouts:
        # `repl-rl train --sampler custom_sampler:LookFirst`, run in this folder, makes the same replacement by name.
        custom_rollouts = replace(rollouts, sampler=LookFirst())
        # One trajectory per entry, in order. A task that appears several times is a group.
        trajectories = await custom_rollouts.collect([task for task in chosen for _ in range(rollouts_per_task)])
    for trajectory in trajectories:
        rewards = [reward.value for line in trajectory.lines for reward in line.rewards]
        print(f"--- {trajectory.id}: outcome {trajectory.outcome}, stop {trajectory.stop}, line rewards {rewards}")
        print(to_text(trajectory))
    for name, value in custom_rollouts.sampler.metrics(trajectories).items():
        print(f"{name} {value:g} in {len(trajectories)} rollouts")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sandbox", default="local", help="local (bubblewrap), docker, or unsafe (no isolation)")
    options = parser.parse_args()
    asyncio.run(play(options.sandbox, tasks=3, rollouts_per_task=2))


if __name__ == "__main__":
    main()

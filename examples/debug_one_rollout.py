"""Play one rollout in one thread of one process, so that a debugger stops anywhere in it.

    python examples/debug_one_rollout.py            # run to the end
    python -m pdb examples/debug_one_rollout.py     # or the VS Code configuration "Debug one rollout"

A `ScriptedEngine` writes fixed lines in place of a policy. An in-process console runs them. There is no model, no
worker, no second process and no thread, and the rollout is the same each time.

The script prints each line with its status, then one row per segment of the trajectory: sampled or observed, the
number of tokens, and the text. The last lines have the outcome and the number of threads.
"""

import asyncio
import threading

from repl_rl import (
    Episode,
    Renderer,
    RolloutLimits,
    Rollouts,
    RolloutSampler,
    RolloutSettings,
    Sampled,
    ScriptedEngine,
    Task,
    Trajectory,
    find_asset,
)
from repl_rl.sandbox import InProcessSandbox

# Lines of the "policy", one entry per line: an error, its repair, the answer. Change it to reproduce a rollout.
SCRIPT = ("x = 6 x 7\n", "x = 6 * 7\n", "submit_final_answer(x)\n")
TASK = Task("t1", "What is 6 * 7?", "42")


class WatchedSampler(RolloutSampler):
    """The line console, written out so that each step of a rollout is a line to stop at. Put your sampler here."""

    async def rollout(self, episode: Episode) -> None:
        """Drive the rollout."""
        # `episode.lines` asks the engine for the next line: token ids and their log probabilities.
        async for line in episode.lines():
            # `episode.push` runs the line, and adds its output and the next prompt as masked tokens.
            result = await episode.push(line)
            # Set a breakpoint on the next line. Worth a look:
            #   line.text, line.token_ids, line.logprobs    what was sampled
            #   result.status, result.text              status and output of the console
            #   episode.ended                               True after an answer, a spent budget or the console's end
            #   episode.build_trajectory()                  the record so far: segments, loss_mask, completion_ids
            print(f"{line.text!r} {result.status}")  # BREAKPOINT


async def play() -> Trajectory:
    """Build the parts of a rollout by hand and play one."""
    # The tokenizer and the prompt. Any folder of a model works: Renderer.from_folder(Path("my_model")).
    renderer = Renderer.from_folder(find_asset("policies/quickstart"))
    # The engine. In a session, `ids` grows by what is sampled and observed; no weights are involved.
    engine = ScriptedEngine.from_text(SCRIPT, renderer.encode)
    rollouts = Rollouts(
        engine,
        # The console: `code.InteractiveConsole` in this process. An editor's debugger can step into a running line;
        # pdb cannot, because a line has no standard input.
        InProcessSandbox(),
        renderer,
        WatchedSampler(),
        # The clock runs while a debugger has stopped the process, so the wall clock limit is an hour.
        RolloutLimits(max_wall_s=3600.0),
        RolloutSettings(template="bare", concurrency=1),
    )
    (trajectory,) = await rollouts.collect([TASK])
    return trajectory


def main() -> None:
    """Play the rollout and print its record."""
    trajectory = asyncio.run(play())
    for segment in trajectory.segments:
        # Only tokens of sampled segments are trained on; `trajectory.loss_mask` is derived from the segment types.
        kind = "sampled" if isinstance(segment, Sampled) else "observed"
        text = "".join(line.text for line in segment.lines) if isinstance(segment, Sampled) else segment.text
        print(f"{kind:<8} {len(segment.token_ids):>3} tokens {text!r}")
    # A rollout that failed has the stop "fault" and a `failure` with the reason.
    print(f"outcome {trajectory.outcome}, stop {trajectory.stop}, failure {trajectory.failure}")
    print(f"tokens to train on: {sum(trajectory.loss_mask)} of {len(trajectory.loss_mask)}")
    print(f"threads: {threading.active_count()}")


if __name__ == "__main__":
    main()

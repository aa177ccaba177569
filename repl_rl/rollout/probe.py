"""Probe: one sampled line that shows the weights of the engine when no rollout can show them."""

from repl_rl.engine.base import Sampling
from repl_rl.record.record import Origin, Record
from repl_rl.record.trajectory import Stop, Trajectory
from repl_rl.rollout.runner import Rollouts
from repl_rl.tasks import Task


async def probed(rollouts: Rollouts, task: Task) -> Trajectory:
    """Sample the first line of the current policy on `task`. No console runs it, and it needs no concurrency slot.

    Raises:
        EngineError: as in the engine's session; the prompt fills the context.
    """
    engine, renderer = rollouts.engine, rollouts.renderer
    origin = Origin(f"{engine.policy_step}-{task.id}-probe", task, rollouts.prompt(task), 0, engine.policy_step)
    prompt, most = origin.prompt.token_ids, rollouts.limits.max_line_tokens
    # A nested session is admitted at once, however full the KV cache is.
    async with engine.session(prompt, Sampling(seed=origin.seed, nested=True)) as session:
        chunk = await session.sample((), max_tokens=most, stop_ids=renderer.stop_ids)
    record = Record(origin)
    record.sampled(renderer.line(chunk, origin.prompt))
    return record.trajectory(Stop.FINISHED, 0.0, None, None)

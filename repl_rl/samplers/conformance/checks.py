"""Checks of the conformance suite. Each raises AssertionError with a sentence about the promise and the result."""

import asyncio
import itertools
import random
import string
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from repl_rl.engine.base import Engine
from repl_rl.errors import EngineDied
from repl_rl.machine.cores import denied_s
from repl_rl.record.trajectory import Observed, Sampled, Stop, Trajectory
from repl_rl.rollout.limits import RolloutLimits
from repl_rl.rollout.renderer import Renderer
from repl_rl.rollout.runner import Rollouts
from repl_rl.rollout.sampler import RolloutSampler
from repl_rl.samplers.conformance.witness import FaultySandbox, Pause, Seen, Trouble, Watched, Witness, at, no_trouble
from repl_rl.sandbox.base import Sandbox
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.tasks import Task

_REFERENCE = "REFERENCE-7391"
_LIMITS = RolloutLimits(max_lines=12, max_line_tokens=256, max_observation_tokens=64, max_wall_s=5.0)
_FILLER = 12 * 256
_SOON_S = 2.0
_GAP_S = 1.0
_TAIL_IDS = 16


@dataclass(frozen=True)
class Bench:
    """Sampler under test, with everything that the checks need."""

    sampler: RolloutSampler
    renderer: Renderer
    template: str
    sandbox: Sandbox = field(default_factory=InProcessSandbox)

    @cached_property
    def scripts(self) -> list[list[int]]:
        """Ids that the policy writes: each rehearsal, and texts that no protocol expects. They never run out."""
        encode, end = self.renderer.written, self.renderer.end_id
        rehearsed = [[i for turn in turns for i in (*encode(turn), end)] for turns in self.sampler.rehearsals]
        draw = random.Random(0)
        noise = "".join(draw.choice(string.printable) for _ in range(400))
        # An immediate end, a line without end, empty lines, and noise.
        odd = [[], [*encode("a")] * _FILLER, [*encode("\n")] * 20, [*encode(noise)]]
        # End tokens and more text follow each script, so that any sampler can end its rollout.
        return [[*ids, *itertools.repeat(end, 20), *([*encode("a\n")] * _FILLER)] for ids in (*rehearsed, *odd)]

    def rollouts(self, engine: Engine, sandbox: Sandbox | None = None, concurrency: int = 64) -> Rollouts:
        """Return rollouts of the sampler on `engine`."""
        return Rollouts(
            engine,
            sandbox or self.sandbox,
            self.renderer,
            self.sampler,
            _LIMITS,
            self.template,
            concurrency=concurrency,
        )

    def witness(self, context_tokens: int = 1 << 20, trouble: Trouble = no_trouble) -> Witness:
        """Return a recording engine that plays `scripts`."""
        return Witness(self.scripts, context_tokens, trouble, self.renderer.forbidden_ids)

    @cached_property
    def tasks(self) -> list[Task]:
        """Tasks, of such a number that every script is very likely played."""
        return [Task(str(i), f"Question {i}?", _REFERENCE) for i in range(5 * len(self.scripts))]


Check = Callable[[Bench], Coroutine[None, None, None]]


def hold(promise: bool, text: str) -> None:
    """Raise AssertionError(text) unless `promise` holds."""
    if not promise:
        raise AssertionError(text)


async def the_prompt_is_the_same_for_all_rollouts_of_a_task(bench: Bench) -> None:
    """Check that all rollouts of a task have the same prompt. A group without a common prompt has no baseline."""
    task = bench.tasks[0]
    prompts = {bench.sampler.prompt(task, bench.renderer, bench.template, "3.11.0") for _ in range(3)}
    hold(len(prompts) == 1, f"three calls of prompt() gave {len(prompts)} different prompts")


async def every_rollout_ends(bench: Bench) -> None:
    """Check that rollouts end for any text of the policy, without the help of the wall clock."""
    found = await bench.rollouts(bench.witness()).collect(bench.tasks)
    failures = [t.failure.message for t in found if t.failure is not None]
    hold(not failures, f"{len(failures)} of {len(found)} rollouts failed: {'; '.join(failures[:1])}")
    late = sum(t.stop is Stop.WALL_CLOCK for t in found)
    hold(not late, f"{late} of {len(found)} rollouts were ended by the wall clock, after {_LIMITS.max_wall_s:g} s")


async def the_record_is_what_the_engine_saw(bench: Bench) -> None:
    """Check that every id is in its place: sampled ones with their log probability, observed ones masked."""
    engine = bench.witness()
    rollouts = bench.rollouts(engine, concurrency=1)
    for task in bench.tasks:
        # One rollout at a time, so that the newest session of the engine is its own.
        (trajectory,) = await rollouts.collect([task])
        if trajectory.failure is None:
            compare(trajectory, engine.seen[-1])


def compare(t: Trajectory, seen: Seen) -> None:
    """Check that a trajectory agrees with the ids that its engine sampled and was given."""
    ids, mask, logprobs = t.completion_ids, t.loss_mask, t.logprobs_T()
    _compare_alternatives(t, seen)
    if t.lines and t.lines[-1].alternatives and len(seen.ids) < len(ids):
        # The engine was not called again after the last choice between candidates, so it lacks the chosen line.
        seen.give(ids[len(seen.ids) :])
    hold(seen.prompt_ids == t.prompt.token_ids, f"rollout {t.id}: the engine was given another prompt")
    hold(list(ids[: len(seen.ids)]) == seen.ids, f"rollout {t.id}: the engine saw other ids than the record has")
    hold(not any(mask[len(seen.ids) :]), f"rollout {t.id}: the record trains on ids that the engine never sampled")
    for position, (logprob, sampled, recorded) in enumerate(zip(seen.logprobs, mask, logprobs, strict=False)):
        hold(sampled is (logprob is not None), f"rollout {t.id}: the loss mask is wrong at token {position}")
        hold(logprob in (None, recorded), f"rollout {t.id}: the log probability is another's at token {position}")


def _compare_alternatives(t: Trajectory, seen: Seen) -> None:
    """Check that each alternative was sampled by the engine at the place of its line."""
    at = 0
    for segment in t.segments:
        if isinstance(segment, Observed):
            at += len(segment.token_ids)
            continue
        for line in segment.lines:
            known = seen.sampled_at(at)
            for other in line.alternatives:
                found = (other.token_ids, other.logprobs) in known
                hold(found, f"rollout {t.id}: the engine sampled no {other.text!r} where it is an alternative")
            at += len(line.token_ids)


async def rollouts_share_no_state(bench: Bench) -> None:
    """Check that the same tasks give the same trajectories, one after the other and all at once."""
    tasks = bench.tasks

    async def play(concurrency: int) -> list[tuple[object, ...]]:
        found = await bench.rollouts(bench.witness(), concurrency=concurrency).collect(tasks)
        return [(t.completion_ids, t.loss_mask, t.stop, t.outcome, [x.rewards for x in t.lines]) for t in found]

    alone, together = await play(1), await play(len(tasks))
    differ = sum(a != b for a, b in zip(alone, together, strict=True))
    hold(not differ, f"{differ} of {len(tasks)} rollouts went otherwise beside others; keep state in local variables")


async def the_reference_answer_is_never_shown(bench: Bench) -> None:
    """Check that neither the prompt nor an observation contains the reference answer."""
    for t in await bench.rollouts(bench.witness()).collect(bench.tasks):
        shown = [t.prompt.text, *(s.text for s in t.segments if isinstance(s, Observed))]
        hold(not any(_REFERENCE in text for text in shown), f"rollout {t.id} shows the reference answer to the policy")


async def no_splice_splits_a_word(bench: Bench) -> None:
    """Check that no text spliced in before a line ends in a space that the tokenizer joins with the next word."""
    if not bench.renderer.samples_space:
        return
    for t in await bench.rollouts(bench.witness()).collect(bench.tasks):
        befores = itertools.pairwise((t.prompt, *t.segments))
        # Prompts and observations directly before a line of the policy.
        for before in (one for one, other in befores if isinstance(other, Sampled) and not isinstance(one, Sampled)):
            tail = bench.renderer.decode(before.token_ids[-_TAIL_IDS:])
            hold(not tail.endswith(" "), f"rollout {t.id} splices {tail[-20:]!r}; end it before its last space")


async def a_full_context_ends_the_rollout(bench: Bench) -> None:
    """Check that a full context ends the rollout with a typed stop, without an error."""
    for task in bench.tasks[:8]:
        prompt = bench.sampler.prompt(task, bench.renderer, bench.template, "3.11.0")
        # The context has room for the prompt and a few ids.
        engine = bench.witness(len(prompt.token_ids) + 24)
        (t,) = await bench.rollouts(engine).collect([task])
        hold(t.failure is None, f"rollout {t.id} failed in a small context: {t.failure and t.failure.message}")


async def cancellation_passes(bench: Bench) -> None:
    """Check that a cancelled rollout ends soon, and that its engine session is closed."""
    for chunk in (1, 2):
        pause = Pause()
        engine = bench.witness(trouble=at(chunk, pause))
        run = asyncio.ensure_future(bench.rollouts(engine).collect(bench.tasks[:1]))
        arrived = asyncio.ensure_future(pause.reached.wait())
        # A rollout with fewer chunks ends without reaching the pause.
        await asyncio.wait({run, arrived}, return_when=asyncio.FIRST_COMPLETED)
        arrived.cancel()
        run.cancel()
        await asyncio.wait({run}, timeout=_SOON_S)
        hold(run.done(), f"{_SOON_S:g} s after it was cancelled, the rollout goes on; let CancelledError pass")
        hold(engine.inner.open_sessions == 0, "the session of the engine is still open after the rollout")


async def errors_of_the_engine_pass(bench: Bench) -> None:
    """Check that the sampler does not catch errors of the engine. They end the run."""
    for chunk in (1, 2):
        engine = bench.witness(trouble=at(chunk, EngineDied("gone")))
        try:
            await bench.rollouts(engine).collect(bench.tasks[:4])
        except EngineDied:
            continue
        # The collection returned, which is correct only if no session reached that chunk.
        hold(max(seen.chunks for seen in engine.seen) < chunk, "the engine died and the sampler went on; catch less")


async def errors_of_the_console_pass(bench: Bench) -> None:
    """Check that the sampler does not catch a console failure of ours, which drops the rollout."""
    sandbox = FaultySandbox(bench.sandbox)
    for task in bench.tasks:
        before = sandbox.sessions
        watched = Watched(bench.sampler)
        (t,) = await replace(bench.rollouts(bench.witness(), sandbox), sampler=watched).collect([task])
        used = sandbox.sessions > before
        hold(not (used and watched.returned), f"rollout {t.id} went on after its console had failed; catch less")


async def the_thread_is_never_blocked(bench: Bench) -> None:
    """Check that the sampler never blocks the thread, which all rollouts share."""
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            # Subtract time in which the machine did not run this process.
            before = time.monotonic() - denied_s()
            await asyncio.sleep(0.005)
            longest = max(longest, time.monotonic() - denied_s() - before)

    heart = asyncio.ensure_future(beat())
    await bench.rollouts(bench.witness()).collect(bench.tasks[:16])
    heart.cancel()
    hold(longest < _GAP_S, f"other rollouts waited {longest:.1f} s for one that did not await")


CHECKS: Sequence[Check] = (
    the_prompt_is_the_same_for_all_rollouts_of_a_task,
    every_rollout_ends,
    the_record_is_what_the_engine_saw,
    rollouts_share_no_state,
    the_reference_answer_is_never_shown,
    no_splice_splits_a_word,
    a_full_context_ends_the_rollout,
    cancellation_passes,
    errors_of_the_engine_pass,
    errors_of_the_console_pass,
    the_thread_is_never_blocked,
)

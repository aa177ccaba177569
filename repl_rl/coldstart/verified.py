"""Doctest rollouts: execute doctests in a sandbox and keep, as trajectories, those whose output is as documented."""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from repl_rl.coldstart.doctests import Example, Specimen
from repl_rl.record.console import prompt
from repl_rl.record.trajectory import (
    Execution,
    Line,
    LineEnd,
    LineStatus,
    Prompt,
    Sampled,
    Segment,
    Stop,
    Trajectory,
)
from repl_rl.rollout.renderer import Renderer
from repl_rl.sandbox.base import PushResult, Sandbox, SandboxSession

_WRITTEN = 0.0
"""Log probability (nats) of a demonstrated token; it was not sampled, so its probability counts as 1."""
_REASONS = {
    LineStatus.TIMEOUT: "ran into a time limit",
    LineStatus.MEMORY_LIMIT: "ran into a memory limit",
    LineStatus.OUTPUT_LIMIT: "printed too much",
    LineStatus.EXITED: "ended its console",
    LineStatus.ANSWERED: "ended its console",
    LineStatus.KILLED: "killed its console",
    LineStatus.SANDBOX_FAULT: "our console failed",
}


@dataclass(slots=True)
class Tally:
    """Counts of doctests by result: whole + cut + dropped."""

    whole: int = 0
    cut: Counter[str] = field(default_factory=Counter)
    """Doctests that are kept up to their first wrong example, by what is wrong."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Doctests of which nothing is kept, by reason."""

    @property
    def kept(self) -> int:
        return self.whole + self.cut.total()

    def as_record(self) -> Mapping[str, int | Mapping[str, int]]:
        """Return the counts as JSON."""
        return {"kept": self.kept, "kept_whole": self.whole, "kept_in_part": dict(self.cut.most_common()),
                "dropped": dict(self.dropped.most_common())}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings for executing and recording demonstrations."""

    renderer: Renderer
    template: str = "bare"
    """Prompt template."""
    max_tokens: int = 1024
    """Longest trajectory, prompt included, tokens (>= 1)."""
    max_lines: int = 32
    """Most lines of one trajectory (>= 1)."""
    concurrency: int = 8
    """Concurrent consoles (>= 1)."""


async def verified(
    specimens: Sequence[Specimen], sandbox: Sandbox, recipe: Recipe, tally: Tally
) -> AsyncIterator[Trajectory]:
    """Yield trajectories of doctests that printed the documented output, in order; `tally` counts the others.

    Each doctest runs in a separate console. If an example goes wrong, the part before it is kept, provided that it
    printed something. Duplicates are dropped. Lines are `Sampled`, so a fine-tuning learns them; everything else is
    `Observed`.
    """
    gate = asyncio.Semaphore(recipe.concurrency)

    async def one(specimen: Specimen) -> tuple[Trajectory | None, str]:
        async with gate:
            return await _play(specimen, sandbox, recipe)

    seen: set[bytes] = set()
    running = [asyncio.create_task(one(specimen)) for specimen in specimens]
    try:
        # Await in the order of the specimens, so that results do not depend on timing.
        for task in running:
            trajectory, wrong = await task
            if trajectory is None:
                tally.dropped[wrong] += 1
                continue
            # Many docstrings repeat the same example.
            key = hashlib.sha256(repr(trajectory.completion_ids).encode()).digest()
            if key in seen:
                tally.dropped["is there already"] += 1
                continue
            seen.add(key)
            if wrong:
                tally.cut[wrong] += 1
            else:
                tally.whole += 1
            yield trajectory
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _play(specimen: Specimen, sandbox: Sandbox, recipe: Recipe) -> tuple[Trajectory | None, str]:
    """Return the correct part of the trajectory, or None, and what went wrong, or ""."""
    began = time.monotonic()
    version = ".".join(map(str, sandbox.python_version))
    start = recipe.renderer.prompt(specimen.question, recipe.template, version)
    segments: list[Segment] = []
    # Number of segments up to the last correct example that printed something.
    right = 0
    wrong = ""
    async with sandbox.session() as console:
        for example in (*(Example((line,), "", None, 0) for line in specimen.setup), *specimen.examples):
            results = await _type(console, example)
            # A wrong example is not recorded: the trajectory ends before it.
            wrong = _wrong(example, results)
            if not wrong:
                _add_segments(segments, example, results, recipe.renderer, start)
            length = len(start.token_ids) + sum(len(s.token_ids) for s in segments)
            if not wrong and (length > recipe.max_tokens or len(segments) > 2 * recipe.max_lines):
                wrong = "is too long"
            if wrong:
                break
            right = len(segments) if any(r.text for r in results) else right
    if not right:
        return None, wrong or "prints nothing"
    digest = hashlib.sha256("\n".join(line for e in specimen.examples for line in e.lines).encode()).hexdigest()
    trajectory = Trajectory(
        id=f"doctest-{digest[:16]}",
        task_id=specimen.name,
        prompt=start,
        segments=tuple(segments[:right]),
        stop=Stop.FINISHED,
        policy_step=0,
        seed=0,
        wall_s=time.monotonic() - began,
    )
    return trajectory, wrong


async def _type(console: SandboxSession, example: Example) -> list[PushResult]:
    results: list[PushResult] = []
    for line in example.lines:
        if not console.ended:
            results.append(await console.push(line))
    return results


def _wrong(example: Example, results: Sequence[PushResult]) -> str:
    """Return what went wrong in an example, or ""."""
    # Limits and dead consoles first: their output means nothing.
    for result in results:
        if result.status in _REASONS:
            return _REASONS[result.status]
    status = results[-1].status
    if status is LineStatus.INCOMPLETE or len(results) < len(example.lines):
        return "is not one statement"
    failed = status in (LineStatus.EXCEPTION, LineStatus.SYNTAX_ERROR)
    if failed and example.error is None:
        return "raised what it should not"
    if not failed and example.error is not None:
        return "did not raise what it should"
    return "" if example.agrees("".join(r.text for r in results)) else "printed something else"


def _add_segments(
    segments: list[Segment], example: Example, results: Sequence[PushResult], renderer: Renderer, start: Prompt
) -> None:
    """Append a sampled line and an observation for each line, encoded separately as in a rollout."""
    for line, result in zip(example.lines, results, strict=True):
        before = segments[-1] if segments else start
        assert not isinstance(before, Sampled)
        ids = renderer.written(line + "\n", before)
        execution = Execution(result.status, result.elapsed_s, ran=(line,))
        written = Line(ids, (_WRITTEN,) * len(ids), line + "\n", LineEnd.NEWLINE, execution)
        shown = renderer.observation(result.text + prompt(result.more))
        segments += (Sampled((written,)), replace(shown, cut=shown.cut or result.cut))

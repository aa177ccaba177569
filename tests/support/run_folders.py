"""Run folders made here: as a training leaves them, with lines of every kind, some of them hostile."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from repl_rl.credit.credited_trajectory import LineCredit
from repl_rl.runs.store import write_step, write_tokens
from repl_rl.trajectory.trajectory import (
    Execution,
    HostCall,
    Line,
    LineEnd,
    LineStatus,
    Observed,
    Prompt,
    Sampled,
    Stop,
    Trajectory,
)

TOKENS = ["x", " = ", "1", "\n", "1/0", "submit_final_answer", "(1)\n", ">>> "]
TRACE = (
    'Traceback (most recent call last):\n  File "<stdin>", line 1, in <module>\nZeroDivisionError: division by zero\n'
)
HOSTILE = (
    '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">\x1b[2J\x00\u202eevil\n'
    ">>> submit_final_answer(666)\n"
)


def line(ids: Sequence[int], status: LineStatus = LineStatus.OK, answer: str | None = None) -> Line:
    """A line of the tokens above."""
    text = "".join(TOKENS[i] for i in ids)
    ran = Execution(status, 0.002, answer, (text.removesuffix("\n"),))
    return Line(tuple(ids), tuple(-0.1 - j for j, _ in enumerate(ids)), text, LineEnd.NEWLINE, ran)


def rollout(step: int, task: str, member: int, printed: str = TRACE) -> Trajectory:
    """Members with an even number are right at once; the others fail first, printing `printed`."""
    good, bad = line([0, 1, 2, 3]), line([4, 3], LineStatus.EXCEPTION)
    first, shown = (bad, f"{printed}>>> ") if member % 2 else (good, ">>> ")
    answered = line([5, 6], LineStatus.ANSWERED, "1")
    prompt = Prompt(f"What is {task}?\n>>> ", (9, 7))
    segments = (Sampled((first,)), Observed(shown, (7,)), Sampled((answered,)))
    outcome = 1.0 if member % 2 == 0 else 0.0
    id = f"{step}-{task}-{member}"
    return Trajectory(id, task, prompt, segments, Stop.ANSWERED, step, member, 0.5, outcome)


def calling(t: Trajectory) -> Trajectory:
    """`t`, whose first line called the host: a trained child that has a masked one of its own, and an error; all of it
    hostile."""
    inner = replace(rollout(0, "inner", 1, HOSTILE), id=f"{t.id}/0.0/{HOSTILE}", parent=f"{t.id}/0", outcome=None)
    child = replace(rollout(0, "child", 0), id=f"{t.id}/0", parent=t.id, outcome=None)
    told = HostCall("llm_query", '{"args": ["deep"], "kwargs": {}}', '"inner says"', None, 0.001, inner.id)
    child = _called(replace(child, children=(inner,)), told)
    asked = HostCall("rollout", f'{{"args": ["{HOSTILE}"]}}', f'"{HOSTILE}"', None, 0.25, child.id, trained=True)
    failed = HostCall(HOSTILE, "{}", None, f"no such function {HOSTILE}", 0.0)
    return _called(replace(t, children=(child,)), asked, failed)


def _called(t: Trajectory, *calls: HostCall) -> Trajectory:
    """`t`, whose first line made `calls`."""
    head, *rest = t.segments
    assert isinstance(head, Sampled)
    first, *more = head.lines
    assert first.execution is not None
    made = replace(first, execution=replace(first.execution, calls=calls))
    return replace(t, segments=(Sampled((made, *more)), *rest))


def credit(t: Trajectory) -> tuple[LineCredit, ...]:
    """A penalty for errors, advantages by outcome."""
    advantage = 1.0 if t.outcome else -1.0
    return tuple(
        LineCredit(-0.1 * bool(line.execution and line.execution.status.is_error), advantage, line.logprobs)
        for line in t.lines
    )


def run_folder(
    path: Path, steps: int = 3, tasks: Sequence[str] = ("one", "two"), members: int = 4, finished: bool = True
) -> Path:
    """A run folder with `steps` x `tasks` x `members` trajectories; the last one of each step is hostile."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text('model = "builtin:quickstart"\nname = "<b>run</b>"\n')
    write_tokens(path / "trajectories", TOKENS)
    rows = []
    for step in range(steps):
        found = [rollout(step, task, member) for task in tasks for member in range(members)]
        found[-1] = replace(rollout(step, tasks[-1], members - 1, HOSTILE + TRACE), id=found[-1].id)
        write_step(path / "trajectories", step + 1, found, [credit(t) for t in found])
        rows.append({"step": step + 1, "solve_rate": step / steps, "line_error_rate": 0.2, "rollout_s": 1.0})
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        summary = {"status": "finished", "engine": "scripted", "solve_rate_first": 0.1, "solve_rate_last": 0.9}
        (path / "summary.json").write_text(json.dumps(summary))
    return path

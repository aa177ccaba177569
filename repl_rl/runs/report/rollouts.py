"""Trajectories in the form of the report: one short row each for the list, and full details in packed chunks.

Numbers are rounded and long texts are cut, with a visible mark. The store keeps the exact values.
"""

import base64
import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean

from repl_rl.credit.children import trained_children
from repl_rl.credit.credited import Credited, LineCredit, ratios
from repl_rl.machine.files import Json
from repl_rl.record.clip import TEXT_CHARS, clip
from repl_rl.record.trajectory import Alternative, HostCall, Line, LineStatus, Trajectory
from repl_rl.runs.report.workspaces import drawn as drawn_setup
from repl_rl.runs.store import Transition, transitions

_ERROR = re.compile(r"^([A-Za-z_][\w.]*)(?::|$)")
_MOST_CALLS = 50
"""Most calls of one line that the page shows; it also shows the number of further calls."""


def legible(text: str) -> str:
    """Return `text` as the page shows it, with a visible mark if its middle is left out."""
    return _utf8(clip(text))


def _utf8(text: str) -> str:
    # A program may print lone surrogates, which no UTF-8 file holds.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def error_class(transition: Transition) -> str:
    """Return the error class of a line: the name of a printed exception, else the status; "" without an error."""
    run = transition.line.execution
    if run is None or not (run.status.is_error or run.status is LineStatus.SANDBOX_FAULT):
        return ""
    if run.status in (LineStatus.EXCEPTION, LineStatus.SYNTAX_ERROR):
        # The last printed row names the exception.
        rows = [row for row in transition.output[-TEXT_CHARS:].split("\n") if row.strip()]
        named = _ERROR.match(rows[-1]) if rows else None
        if named is not None:
            return named[1].rpartition(".")[2][:40]
    return run.status.value


def pack(value: Json) -> str:
    """Return compressed JSON in base64, which holds no `<`, even if a program printed one."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def row(entry: Credited, prompts: dict[str, int]) -> list[Json]:
    """Return the list's row of a trajectory. `prompts` maps each distinct prompt to its number; new ones are added.

    Columns: id, task, prompt, policy step, outcome, stop, line statuses, error classes, sum of line rewards, sampled
    tokens, answer, solved.
    """
    t = entry.trajectory
    classes = dict.fromkeys(name for name in map(error_class, transitions(t)) if name)
    return [
        _utf8(t.id),
        _utf8(t.task_id),
        prompts.setdefault(legible(t.prompt.text), len(prompts)),
        t.policy_step,
        t.outcome,
        t.stop.value,
        " ".join(dict.fromkeys(execution.status.value for execution in t.executions)),
        list(classes),
        _round(sum(credit.reward for credit in entry.credit_L)) if entry.credit_L else None,
        t.sampled_tokens,
        None if t.answer is None else legible(t.answer)[:200],
        t.solved,
    ]


def detail(entry: Credited) -> dict[str, Json]:
    """Return the details of a trajectory, with the children of its host function calls."""
    t = entry.trajectory
    rows = trained_children(t, [credit.advantage for credit in entry.credit_L]) if entry.credit_L else ()
    return _drawn(t, entry.credit_L, {child.id: advantages_L for child, advantages_L in rows}, trained=True)


def _drawn(
    t: Trajectory, credit_L: Sequence[LineCredit], advantages: Mapping[str, Sequence[float]], trained: bool
) -> dict[str, Json]:
    """Return the details of a trajectory or child.

    `advantages` holds one row per child below it. `trained` is True if the update has a row for it.
    """
    found = zip(transitions(t), credit_L or (None,) * len(t.lines), strict=True)
    lines: list[Json] = [_line(transition, credit) for transition, credit in found]
    failure = None if t.failure is None else legible(f"{t.failure.kind}: {t.failure.message}")
    parts: list[Json] = [[_utf8(part.name), _round(part.value)] for part in t.outcomes]
    asked = {call.child for line in t.lines for call in _calls(line) if call.trained and trained}
    drawn: dict[str, Json] = {"lines": lines, "failure": failure, "wall_s": _round(t.wall_s), "seed": t.seed}
    drawn |= {"parts": parts, "workspace": None if t.workspace is None else drawn_setup(t.workspace)}
    drawn["children"] = [_child(child, advantages, child.id in asked) for child in t.children]
    return drawn


def _line(transition: Transition, credit: LineCredit | None) -> dict[str, Json]:
    line, run = transition.line, transition.line.execution
    calls = _calls(line)
    return {
        "text": legible(line.text),
        "prompt": transition.prompt,
        "seen": None if transition.observed is None else legible(transition.observed.text),
        "end": line.end.value,
        "status": run.status.value if run else None,
        "ms": _round(run.elapsed_s * 1000) if run else None,
        "ids": list(line.token_ids),
        "logprobs": [_round(value) for value in line.logprobs],
        "reward": _round(credit.reward) if credit else None,
        "advantage": _round(credit.advantage) if credit else None,
        "ratios": [_round(value, 7) for value in ratios(line, credit)] if credit else [],
        "named": [[_utf8(reward.name), _round(reward.value)] for reward in line.rewards],
        "others": [_other(other) for other in line.alternatives],
        "calls": [_call(call) for call in calls[:_MOST_CALLS]],
        "more_calls": max(0, len(calls) - _MOST_CALLS),
    }


def _other(other: Alternative) -> dict[str, Json]:
    taught = None if other.advantage is None else _round(other.advantage)
    return {"text": legible(other.text), "logprob": _round(fmean(other.logprobs)), "advantage": taught}


def _calls(line: Line) -> Sequence[HostCall]:
    return line.execution.calls if line.execution is not None else ()


def _call(call: HostCall) -> dict[str, Json]:
    return {
        "name": _utf8(call.name),
        "arguments": legible(call.arguments),
        "answer": None if call.answer is None else legible(call.answer),
        "error": None if call.error is None else legible(call.error),
        "ms": _round(call.elapsed_s * 1000),
        "child": _utf8(call.child),
    }


def _child(child: Trajectory, advantages: Mapping[str, Sequence[float]], trained: bool) -> dict[str, Json]:
    """Return the details of a child of a call. Its lines have the advantage of the calling line, and reward 0."""
    credit_L = [LineCredit(0.0, advantage) for advantage in advantages.get(child.id, ())]
    return {**_told(child), **_drawn(child, credit_L, advantages, trained), "trained": trained}


def whole(entry: Credited) -> dict[str, Json]:
    """Return the details of a trajectory, including the fields that the list's row holds elsewhere."""
    return {**_told(entry.trajectory), **detail(entry)}


def _told(t: Trajectory) -> dict[str, Json]:
    return {
        "id": _utf8(t.id),
        "prompt": legible(t.prompt.text),
        "outcome": t.outcome,
        "solved": t.solved,
        "stop": t.stop.value,
        "answer": None if t.answer is None else legible(t.answer),
    }


def all_lines(trajectory: Trajectory) -> Iterator[Line]:
    """Yield the lines of a trajectory and of all its children."""
    yield from trajectory.lines
    for child in trajectory.children:
        yield from all_lines(child)


def step_figures(entries: Sequence[Credited]) -> dict[str, Json]:
    """Return the step's additions to the metrics: lines per error class, and mean rewards by line status."""
    # Rollouts that failed on our side are not samples, so they do not count.
    sound = [entry for entry in entries if entry.trajectory.failure is None]
    classes: dict[str, int] = {}
    earned: dict[str, float] = {}
    for entry in sound:
        # Trajectories that were not trained on have no credit.
        for transition, credit in zip(transitions(entry.trajectory), entry.credit_L, strict=False):
            status = transition.line.execution.status.value if transition.line.execution else "not run"
            earned[status] = earned.get(status, 0.0) + credit.reward
        for transition in transitions(entry.trajectory):
            name = error_class(transition)
            if name:
                classes[name] = classes.get(name, 0) + 1
    outcomes = [e.trajectory.outcome for e in sound if e.trajectory.outcome is not None]
    return {
        "lines": sum(len(entry.trajectory.lines) for entry in sound),
        "classes": classes,
        "outcome": _round(fmean(outcomes)) if outcomes else 0.0,
        "earned": {name: _round(value / len(sound)) for name, value in earned.items() if value},
    }


def captions(ids: Iterable[int], texts: Sequence[str]) -> dict[str, Json]:
    """Return the text of each id that occurs; the page shows an id without a text as a number."""
    return {str(i): _utf8(texts[i]) for i in sorted(set(ids)) if 0 <= i < len(texts)}


def _round(value: float, digits: int = 5) -> float:
    return float(f"{value:.{digits}g}")

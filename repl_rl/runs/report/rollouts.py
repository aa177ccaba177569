"""Trajectories as the page takes them: a short row each for the list, and the whole of it in packed chunks.

Figures are rounded and long texts cut, visibly: the page is for looking, the store keeps what is exact.
"""

import base64
import gzip
import json
import re
from collections.abc import Iterable, Sequence
from statistics import fmean

from repl_rl.credit.credited import Credited, ratios
from repl_rl.machine.files import Json
from repl_rl.record.clip import TEXT_CHARS, clip
from repl_rl.record.trajectory import LineStatus
from repl_rl.runs.report.workspaces import drawn
from repl_rl.runs.store import Transition, transitions

_ERROR = re.compile(r"^([A-Za-z_][\w.]*)(?::|$)")


def legible(text: str) -> str:
    """`text` as far as the page shows it, with a visible mark where the middle was left out."""
    return _utf8(clip(text))


def _utf8(text: str) -> str:
    # A program may print lone surrogates, which no UTF-8 file holds.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def error_class(transition: Transition) -> str:
    """What went wrong in a line: the exception's name where one was printed, else the status; "" if nothing did."""
    run = transition.line.execution
    if run is None or not (run.status.is_error or run.status is LineStatus.SANDBOX_FAULT):
        return ""
    if run.status in (LineStatus.EXCEPTION, LineStatus.SYNTAX_ERROR):
        rows = [row for row in transition.output[-TEXT_CHARS:].split("\n") if row.strip()]
        named = _ERROR.match(rows[-1]) if rows else None
        if named is not None:
            return named[1].rpartition(".")[2][:40]
    return run.status.value


def pack(value: Json) -> str:
    """Compressed JSON in base64: it holds no `<`, whatever a program printed."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def row(entry: Credited, prompts: dict[str, int]) -> list[Json]:
    """The list's row of a trajectory; `prompts` numbers the different prompts and grows.

    Columns: id, task, prompt, policy step, outcome, stop, line statuses, error classes, sum of line rewards, sampled
    tokens, answer, whether it is solved.
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
    """A trajectory as the page draws it."""
    t = entry.trajectory
    credit_L = entry.credit_L or (None,) * len(t.lines)
    lines: list[Json] = []
    for transition, credit in zip(transitions(t), credit_L, strict=True):
        line, run = transition.line, transition.line.execution
        lines.append(
            {
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
            }
        )
    failure = None if t.failure is None else legible(f"{t.failure.kind}: {t.failure.message}")
    parts: list[Json] = [[_utf8(part.name), _round(part.value)] for part in t.outcomes]
    setup = None if t.workspace is None else drawn(t.workspace)
    told = {"lines": lines, "failure": failure, "wall_s": _round(t.wall_s), "seed": t.seed}
    return {**told, "parts": parts, "workspace": setup}


def whole(entry: Credited) -> dict[str, Json]:
    """A trajectory as the page draws it, with what it takes from the list's row elsewhere."""
    t = entry.trajectory
    return {
        "id": _utf8(t.id),
        "prompt": legible(t.prompt.text),
        "outcome": t.outcome,
        "solved": t.solved,
        "stop": t.stop.value,
        "answer": None if t.answer is None else legible(t.answer),
        **detail(entry),
    }


def step_figures(entries: Sequence[Credited]) -> dict[str, Json]:
    """What the trajectories of one step add to the metrics: lines by error class, and what rewards are made of."""
    sound = [entry for entry in entries if entry.trajectory.failure is None]
    classes: dict[str, int] = {}
    earned: dict[str, float] = {}
    for entry in sound:
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
    """The text of each id that occurs; ids without one are shown as numbers."""
    return {str(i): _utf8(texts[i]) for i in sorted(set(ids)) if 0 <= i < len(texts)}


def _round(value: float, digits: int = 5) -> float:
    return float(f"{value:.{digits}g}")

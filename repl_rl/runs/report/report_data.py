"""Data of the report: a run folder, or single trajectories, as one JSON value.

Each trajectory has one short row for the list, and its full details are in packed chunks. Numbers are rounded and long
texts are cut, with a visible mark. The store keeps the exact values.
"""

import base64
import gzip
import json
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from statistics import fmean

from repl_rl.credit.credited_trajectory import (
    CreditedTrajectory,
    LineCredit,
    compute_importance_ratios,
    iterate_trained_children,
)
from repl_rl.errors import StoreError
from repl_rl.runs.run_metadata import CONFIG, read_metric_rows, read_summary, read_text, validate_run_folder
from repl_rl.runs.store import LineTransition, Store, build_transitions
from repl_rl.tasks.task_workspace import describe_value
from repl_rl.trajectory.console_text import TEXT_CHARS, clip_middle
from repl_rl.trajectory.trajectory import Alternative, HostCall, Line, LineStatus, Trajectory, WorkspaceContent
from repl_rl.utils.atomic_files import Json
from repl_rl.utils.installed_versions import STACK, collect_versions

MAX_TRAJECTORIES = 20_000
"""Approximate limit of trajectories in one page.

Of a longer run the page shows one whole step in N, with a note. Metrics per step still count all trajectories.
"""

_CHUNK = 128
"""Trajectories per packed chunk, which the page unpacks when one of them is opened."""
_PACKAGES = (*STACK, "jupyter_client", "ipykernel")

_ERROR_NAME = re.compile(r"^([A-Za-z_][\w.]*)(?::|$)")
"""Last row of a traceback: the name of the exception, then its message."""
_MAX_CALLS = 50
"""Maximum number of calls of one line that the page shows; it also shows the number of further calls."""

_PART_CHARS = 1000
"""Maximum number of characters per value, file and program; the store keeps all of them."""
_MAX_PARTS = 20
"""Maximum number of parts of one workspace; the page also shows the number of further parts."""


def build_payload(run: Path, limit: int = MAX_TRAJECTORIES) -> dict[str, Json]:
    """Return the data of the page for the run folder `run`; missing files are left out.

    Raises:
        StoreError: `run` is not a run folder, or one of its files cannot be read.
    """
    validate_run_folder(run)
    notes: list[str] = []
    page = _build_rollout_payload(run, limit, notes)
    if (summary := read_summary(run)) is None:
        notes.append("there is no summary.json yet: the run is still running, or was killed")
    return {
        "name": run.resolve().name,
        "summary": summary or {},
        "config": shorten_text(read_text(run / CONFIG) or ""),
        "versions": _collect_versions(),
        "metrics": build_metric_columns(run),
        "notes": notes,
        **page,
    }


def build_metric_columns(run: Path) -> dict[str, Json]:
    """Return each metric of `metrics.jsonl` by name, with one value per step; None if the step has no such value."""
    rows = read_metric_rows(run)
    names = sorted({name for row in rows for name in row})
    return {
        name: [value if isinstance(value := row.get(name), int | float) else None for row in rows] for name in names
    }


def build_entries_payload(entries: Sequence[CreditedTrajectory], tokens: Sequence[str]) -> dict[str, Json]:
    """Return the rollouts' part alone, for the player. `tokens` are the texts of token ids."""
    rows: list[Json] = []
    prompts: dict[str, int] = {}
    ids: set[int] = set()
    chunks: list[Json] = []
    for start in range(0, len(entries), _CHUNK):
        chunks.append(_pack_chunk(entries[start : start + _CHUNK], rows, prompts, ids))
    return {"rows": rows, "prompts": list(prompts), "chunks": chunks, "tokens": build_captions(ids, tokens)}


def _build_rollout_payload(run: Path, limit: int, notes: list[str]) -> dict[str, Json]:
    """Return the rollouts' part of the payload, read in one pass; reasons for missing rollouts go to `notes`."""
    if not (run / "trajectories").is_dir():
        return {"rows": [], "prompts": [], "chunks": [], "tokens": {}, "steps": []}
    store = Store(run)
    stride = -(-len(store) // limit)
    rows: list[Json] = []
    prompts: dict[str, int] = {}
    chunks: list[Json] = []
    steps: list[Json] = []
    ids: set[int] = set()
    # Every step adds to the figures, but only each `stride`-th step's rollouts go into the page.
    pending: list[CreditedTrajectory] = []
    for number, (_, members) in enumerate(groupby(store, lambda entry: entry.trajectory.policy_step)):
        entries = list(members)
        steps.append({"step": number + 1, **compute_step_metrics_for_page(entries)})
        if number % max(stride, 1) == 0:
            pending += entries
        # Pack full chunks at once, so that memory holds few trajectories.
        while len(pending) >= _CHUNK:
            chunks.append(_pack_chunk(pending[:_CHUNK], rows, prompts, ids))
            pending = pending[_CHUNK:]
    if pending:
        chunks.append(_pack_chunk(pending, rows, prompts, ids))
    if stride > 1:
        notes.append(f"{len(rows):,} of {len(store):,} trajectories are in this page: one step in {stride}")
    notes.extend(f"not readable: {damage}" for damage in store.damaged_regions)
    return {
        "rows": rows,
        "prompts": list(prompts),
        "chunks": chunks,
        "tokens": build_captions(ids, store.read_tokens()),
        "steps": steps,
    }


def _pack_chunk(entries: Sequence[CreditedTrajectory], rows: list[Json], prompts: dict[str, int], ids: set[int]) -> str:
    """Pack the details of some entries, and add their rows, prompts and token ids to those of the page."""
    for entry in entries:
        rows.append(build_row(entry, prompts))
        ids.update(i for line in iterate_all_lines(entry.trajectory) for i in line.token_ids)
    return pack_json([build_detail(entry) for entry in entries])


def _collect_versions() -> dict[str, Json]:
    """Return versions of this machine's Python and packages, usually those of the run."""
    return {"python": platform.python_version(), "platform": platform.platform(), **collect_versions(_PACKAGES)}


def build_row(entry: CreditedTrajectory, prompts: dict[str, int]) -> list[Json]:
    """Return the list's row of a trajectory. `prompts` maps each distinct prompt to its number; new ones are added.

    Columns: id, task, prompt, policy step, outcome, stop, line statuses, error classes, sum of line rewards, sampled
    tokens, answer, solved.
    """
    t = entry.trajectory
    classes = dict.fromkeys(name for name in map(find_error_class, build_transitions(t)) if name)
    return [
        _replace_surrogates(t.id),
        _replace_surrogates(t.task_id),
        prompts.setdefault(shorten_text(t.prompt.text), len(prompts)),
        t.policy_step,
        t.outcome,
        t.stop.value,
        " ".join(dict.fromkeys(execution.status.value for execution in t.executions)),
        list(classes),
        _round_digits(sum(credit.reward for credit in entry.credit_L)) if entry.credit_L else None,
        t.sampled_tokens,
        None if t.answer is None else shorten_text(t.answer)[:200],
        t.solved,
    ]


def build_detail(entry: CreditedTrajectory) -> dict[str, Json]:
    """Return the details of a trajectory, with the children of its host function calls."""
    t = entry.trajectory
    rows = iterate_trained_children(t, [credit.advantage for credit in entry.credit_L]) if entry.credit_L else ()
    return _build_trajectory_detail(
        t, entry.credit_L, {child.id: advantages_L for child, advantages_L in rows}, trained=True
    )


def build_full_detail(entry: CreditedTrajectory) -> dict[str, Json]:
    """Return the details of a trajectory, including the fields that the list's row holds elsewhere."""
    return {**_build_summary(entry.trajectory), **build_detail(entry)}


def _build_summary(t: Trajectory) -> dict[str, Json]:
    """Return the fields that the list's row holds for a trajectory in the list."""
    return {
        "id": _replace_surrogates(t.id),
        "prompt": shorten_text(t.prompt.text),
        "outcome": t.outcome,
        "solved": t.solved,
        "stop": t.stop.value,
        "answer": None if t.answer is None else shorten_text(t.answer),
    }


def _build_trajectory_detail(
    t: Trajectory, credit_L: Sequence[LineCredit], advantages: Mapping[str, Sequence[float]], trained: bool
) -> dict[str, Json]:
    """Return the details of a rollout, or of a child of a host function call.

    Args:
        t: the rollout or child.
        credit_L: credit per line, or nothing if it has none.
        advantages: advantage of each line of each trained child, by child id, at any depth. Other children are missing.
        trained: True for a rollout, and for a child if its call and all calls above it are trained.
    """
    pairs = zip(build_transitions(t), credit_L or (None,) * len(t.lines), strict=True)
    lines: list[Json] = [_build_line(transition, credit) for transition, credit in pairs]
    failure = None if t.failure is None else shorten_text(f"{t.failure.kind}: {t.failure.message}")
    parts: list[Json] = [[_replace_surrogates(part.name), _round_digits(part.value)] for part in t.outcomes]
    # A child has a row of the update if its call is trained, all calls above it are, and it did not fail on our side.
    trained_calls = {call.child for line in t.lines for call in _get_calls(line) if call.trained and trained}
    trained_children = {child.id for child in t.children if child.id in trained_calls and child.trainable}
    detail: dict[str, Json] = {"lines": lines, "failure": failure, "wall_s": _round_digits(t.wall_s), "seed": t.seed}
    detail |= {"parts": parts, "workspace": None if t.workspace is None else build_workspace_view(t.workspace)}
    detail["children"] = [_build_child(child, advantages, child.id in trained_children) for child in t.children]
    return detail


def _build_line(transition: LineTransition, credit: LineCredit | None) -> dict[str, Json]:
    line, execution = transition.line, transition.line.execution
    calls = _get_calls(line)
    return {
        "text": shorten_text(line.text),
        "prompt": transition.prompt,
        "seen": None if transition.observed is None else shorten_text(transition.observed.text),
        "end": line.end.value,
        "status": execution.status.value if execution else None,
        "ms": _round_digits(execution.elapsed_s * 1000) if execution else None,
        "ids": list(line.token_ids),
        "logprobs": [_round_digits(value) for value in line.logprobs],
        "reward": _round_digits(credit.reward) if credit else None,
        "advantage": _round_digits(credit.advantage) if credit else None,
        "ratios": [_round_digits(value, 7) for value in compute_importance_ratios(line, credit)] if credit else [],
        "named": [[_replace_surrogates(reward.name), _round_digits(reward.value)] for reward in line.rewards],
        "others": [_build_alternative(other) for other in line.alternatives],
        "calls": [_build_call(call) for call in calls[:_MAX_CALLS]],
        "more_calls": max(0, len(calls) - _MAX_CALLS),
    }


def _build_alternative(other: Alternative) -> dict[str, Json]:
    taught = None if other.advantage is None else _round_digits(other.advantage)
    return {"text": shorten_text(other.text), "logprob": _round_digits(fmean(other.logprobs)), "advantage": taught}


def _get_calls(line: Line) -> Sequence[HostCall]:
    return line.execution.calls if line.execution is not None else ()


def _build_call(call: HostCall) -> dict[str, Json]:
    return {
        "name": _replace_surrogates(call.name),
        "arguments": shorten_text(call.arguments),
        "answer": None if call.answer is None else shorten_text(call.answer),
        "error": None if call.error is None else shorten_text(call.error),
        "ms": _round_digits(call.elapsed_s * 1000),
        "child": _replace_surrogates(call.child),
    }


def _build_child(child: Trajectory, advantages: Mapping[str, Sequence[float]], trained: bool) -> dict[str, Json]:
    """Return the details of a child of a call. Its lines have the advantage of the calling line, and reward 0."""
    credit_L = [LineCredit(0.0, advantage) for advantage in advantages.get(child.id, ())]
    return {
        **_build_summary(child),
        **_build_trajectory_detail(child, credit_L, advantages, trained),
        "trained": trained,
    }


def build_workspace_view(setup: WorkspaceContent) -> dict[str, Json]:
    """Return the digest and a list of parts, each with its name, its size, and the beginning and end of its text."""
    try:
        return {"digest": setup.digest, "parts": _list_parts(setup)}
    except (StoreError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return {"digest": setup.digest, "parts": [["not readable", "", _shorten_part(str(error))]]}


# The rollouts of a group share their workspace.
@lru_cache(maxsize=256)
def _list_parts(setup: WorkspaceContent) -> list[Json]:
    content = json.loads(setup.content)
    parts: list[Json] = [
        _build_part(name, describe_value(value), json.dumps(value)) for name, value in content["values"].items()
    ]
    for path, data in content["files"].items():
        raw = base64.b64decode(data)
        parts.append(_build_part(f"file {path}", f"{len(raw):,} bytes", raw.decode("utf-8", "backslashreplace")))
    if content["preload"]:
        parts.append(_build_part("imported", "", ", ".join(content["preload"])))
    if content["lines"]:
        parts.append(_build_part("lines", f"{len(content['lines']):,}", "\n".join(content["lines"])))
    if len(parts) > _MAX_PARTS:
        parts = [*parts[:_MAX_PARTS], [f"{len(parts) - _MAX_PARTS} more", "", ""]]
    return parts


def _build_part(name: str, size: str, text: str) -> list[Json]:
    return [_shorten_part(name), size, _shorten_part(text)]


def _shorten_part(text: str) -> str:
    return _replace_surrogates(clip_middle(text, _PART_CHARS))


def iterate_all_lines(trajectory: Trajectory) -> Iterator[Line]:
    """Yield the lines of a trajectory and of all its children."""
    yield from trajectory.lines
    for child in trajectory.children:
        yield from iterate_all_lines(child)


def compute_step_metrics_for_page(entries: Sequence[CreditedTrajectory]) -> dict[str, Json]:
    """Return the step's additions to the metrics: lines per error class, and mean rewards by line status."""
    # Rollouts that failed on our side are not samples, so they do not count.
    valid = [entry for entry in entries if entry.trajectory.failure is None]
    classes: dict[str, int] = {}
    reward_sums: dict[str, float] = {}
    for entry in valid:
        # Trajectories that were not trained on have no credit.
        for transition, credit in zip(build_transitions(entry.trajectory), entry.credit_L, strict=False):
            status = transition.line.execution.status.value if transition.line.execution else "not run"
            reward_sums[status] = reward_sums.get(status, 0.0) + credit.reward
        for transition in build_transitions(entry.trajectory):
            name = find_error_class(transition)
            if name:
                classes[name] = classes.get(name, 0) + 1
    outcomes = [e.trajectory.outcome for e in valid if e.trajectory.outcome is not None]
    return {
        "lines": sum(len(entry.trajectory.lines) for entry in valid),
        "classes": classes,
        "outcome": _round_digits(fmean(outcomes)) if outcomes else 0.0,
        "earned": {name: _round_digits(value / len(valid)) for name, value in reward_sums.items() if value},
    }


def find_error_class(transition: LineTransition) -> str:
    """Return the error class of a line: the name of a printed exception, else the status; "" without an error."""
    execution = transition.line.execution
    if execution is None or not (execution.status.is_error or execution.status is LineStatus.SANDBOX_FAULT):
        return ""
    if execution.status in (LineStatus.EXCEPTION, LineStatus.SYNTAX_ERROR):
        # The last printed row names the exception.
        rows = [row for row in transition.output[-TEXT_CHARS:].split("\n") if row.strip()]
        match = _ERROR_NAME.match(rows[-1]) if rows else None
        if match is not None:
            return match[1].rpartition(".")[2][:40]
    return execution.status.value


def build_captions(ids: Iterable[int], texts: Sequence[str]) -> dict[str, Json]:
    """Return the text of each id that occurs; the page shows an id without a text as a number."""
    return {str(i): _replace_surrogates(texts[i]) for i in sorted(set(ids)) if 0 <= i < len(texts)}


def shorten_text(text: str) -> str:
    """Return `text` as the page shows it, with a visible mark if its middle is left out."""
    return _replace_surrogates(clip_middle(text))


def _replace_surrogates(text: str) -> str:
    # A program may print lone surrogates, which no UTF-8 file holds.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _round_digits(value: float, digits: int = 5) -> float:
    return float(f"{value:.{digits}g}")


def pack_json(value: Json) -> str:
    """Return compressed JSON in base64, which holds no `<`, even if a program printed one."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()

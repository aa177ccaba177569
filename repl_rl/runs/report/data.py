"""Payload of the report: the data of a run folder as one JSON value."""

import platform
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from repl_rl.credit.credited import Credited
from repl_rl.machine.files import Json
from repl_rl.machine.versions import STACK, versions
from repl_rl.runs.report.rollouts import all_lines, captions, detail, legible, pack, row, step_figures
from repl_rl.runs.store import Store
from repl_rl.runs.told import CONFIG, refuse_foreign, rows_of, summary_of, text_of

MAX_TRAJECTORIES = 20_000
"""Most trajectories in one page.

From a longer run whole steps are left out at regular intervals, with a note in the page.
"""

_CHUNK = 128
_PACKAGES = (*STACK, "jupyter_client", "ipykernel")


def payload(run: Path, limit: int = MAX_TRAJECTORIES) -> dict[str, Json]:
    """Return the data of the page for the run folder `run`; missing files are left out.

    Raises:
        StoreError: `run` is not a run folder, or one of its files cannot be read.
    """
    refuse_foreign(run)
    notes: list[str] = []
    page = _trajectories(run, limit, notes)
    if (said := summary_of(run)) is None:
        notes.append("there is no summary.json yet: the run goes on, or was killed")
    return {
        "name": run.resolve().name,
        "summary": said or {},
        "config": legible(text_of(run / CONFIG) or ""),
        "versions": _versions(),
        "metrics": columns(run),
        "notes": notes,
        **page,
    }


def columns(run: Path) -> dict[str, Json]:
    """Return each metric of `metrics.jsonl` by name, with one value per step; None if the step has no such value."""
    found = rows_of(run)
    names = sorted({name for row in found for name in row})
    return {
        name: [value if isinstance(value := row.get(name), int | float) else None for row in found] for name in names
    }


def _trajectories(run: Path, limit: int, notes: list[str]) -> dict[str, Json]:
    """Return the rollouts' part of the payload, read in one pass."""
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
    kept: list[Credited] = []
    for number, (_, members) in enumerate(groupby(store, lambda entry: entry.trajectory.policy_step)):
        entries = list(members)
        steps.append({"step": number + 1, **step_figures(entries)})
        if number % max(stride, 1) == 0:
            kept += entries
        # Pack full chunks at once, so that memory holds few trajectories.
        while len(kept) >= _CHUNK:
            chunks.append(_chunk(kept[:_CHUNK], rows, prompts, ids))
            kept = kept[_CHUNK:]
    if kept:
        chunks.append(_chunk(kept, rows, prompts, ids))
    if stride > 1:
        notes.append(f"{len(rows):,} of {len(store):,} trajectories are in this page: one step in {stride}")
    notes.extend(f"not readable: {damage}" for damage in store.damage)
    return {
        "rows": rows,
        "prompts": list(prompts),
        "chunks": chunks,
        "tokens": captions(ids, store.tokens()),
        "steps": steps,
    }


def entries_payload(entries: Sequence[Credited], tokens: Sequence[str]) -> dict[str, Json]:
    """Return the rollouts' part alone, for the player. `tokens` are the texts of token ids."""
    rows: list[Json] = []
    prompts: dict[str, int] = {}
    ids: set[int] = set()
    chunks: list[Json] = []
    for start in range(0, len(entries), _CHUNK):
        chunks.append(_chunk(entries[start : start + _CHUNK], rows, prompts, ids))
    return {"rows": rows, "prompts": list(prompts), "chunks": chunks, "tokens": captions(ids, tokens)}


def _chunk(entries: Sequence[Credited], rows: list[Json], prompts: dict[str, int], ids: set[int]) -> str:
    for entry in entries:
        rows.append(row(entry, prompts))
        ids.update(i for line in all_lines(entry.trajectory) for i in line.token_ids)
    return pack([detail(entry) for entry in entries])


def _versions() -> dict[str, Json]:
    """Return versions of this machine's Python and packages, usually those of the run."""
    return {"python": platform.python_version(), "platform": platform.platform(), **versions(_PACKAGES)}

"""What a run folder has to say, as one JSON value for the page."""

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
"""Trajectories in one page. Of a longer run, whole steps are left out evenly, and the page says so."""

_CHUNK = 128
_PACKAGES = (*STACK, "jupyter_client", "ipykernel")


def payload(run: Path, limit: int = MAX_TRAJECTORIES) -> dict[str, Json]:
    """Everything that the page shows of the run folder `run`; what is missing there is left out.

    Raises:
        StoreError: `run` is no run folder, or a file of it cannot be read.
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
    """Each figure of `metrics.jsonl` by its name, a value a step; None where a step has none."""
    found = rows_of(run)
    names = sorted({name for row in found for name in row})
    return {
        name: [value if isinstance(value := row.get(name), int | float) else None for row in found] for name in names
    }


def _trajectories(run: Path, limit: int, notes: list[str]) -> dict[str, Json]:
    """The rollouts' part of the payload, read in one pass."""
    if not (run / "trajectories").is_dir():
        return {"rows": [], "prompts": [], "chunks": [], "tokens": {}, "steps": []}
    store = Store(run)
    stride = -(-len(store) // limit)
    rows: list[Json] = []
    prompts: dict[str, int] = {}
    chunks: list[Json] = []
    steps: list[Json] = []
    ids: set[int] = set()
    kept: list[Credited] = []
    for number, (_, members) in enumerate(groupby(store, lambda entry: entry.trajectory.policy_step)):
        entries = list(members)
        steps.append({"step": number + 1, **step_figures(entries)})
        if number % max(stride, 1) == 0:
            kept += entries
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
    """The rollouts' part alone, for the player. `tokens` are the texts of token ids."""
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
    """Of this machine's Python and packages: where the page was made, as a rule where the run was."""
    return {"python": platform.python_version(), "platform": platform.platform(), **versions(_PACKAGES)}

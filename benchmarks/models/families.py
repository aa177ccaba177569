"""Train every family of the zoo on every engine; docs/models.md lists the outcome, results/models.md has all rows.

    python -m benchmarks.models.families                     all engines, one process per engine
    python -m benchmarks.models.families --only NAME ...     those families on each engine; the other rows stay
    python -m benchmarks.models.families transformers NAME   one engine, its rows on standard output

A row is either trained (two steps, so that a weight sync lies between them) and its saved policy loaded again, or
refused. Every cell of the table comes from benchmarks/results/models.json, which this command writes.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import AutoModelForCausalLM

from benchmarks.generated_blocks import RESULTS, ROOT, Block
from benchmarks.models.zoo import ZOO, Family
from repl_rl.engine import ENGINES, EngineOptions
from repl_rl.errors import ConfigError, ReplRLError
from repl_rl.models.parameter_names import load_skeleton
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout_config import RolloutConfig
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.config_checks import validate_model
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import train
from repl_rl.utils.package_data import find_asset

PAGE = Block(RESULTS / "models.md", "models/families")
SUMMARY = Block(ROOT / "docs" / "models.md", "models/families")
FIGURES = RESULTS / "models.json"
ENGINE_NAMES = ("transformers", "vllm")
TRACEBACK = "Traceback (most recent call last)"
CONTEXT = 256


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a family on an engine."""

    family: str
    engine: str
    outcome: str
    """trained, refused, or failed: neither, which is a defect."""
    reason: str
    """Why it was refused or failed; empty: it was not."""
    check_s: float
    """CPU time of the checks before anything starts, without the import of heavy packages."""
    gap: float
    """Largest gap of one log probability between sampler and trainer, nats; 0 where nothing was trained."""


def play(family: Family, engine: str) -> Row:
    """Train a family on an engine, or be refused."""
    with tempfile.TemporaryDirectory() as place:
        folder = family.write(Path(place) / "model")
        began = time.process_time()
        try:
            check(folder, engine)
        except ConfigError as error:
            told = str(error).replace(place, "")
            return Row(family.name, engine, "refused", told, time.process_time() - began, 0.0)
        check_s = time.process_time() - began
        try:
            final, gap = trained(folder, engine, Path(place) / "first", steps=2)
            AutoModelForCausalLM.from_pretrained(final)
            check(final, engine)
            assert load_skeleton(final).trained_shapes == load_skeleton(folder).trained_shapes, (
                "it has other weights than were loaded before"
            )
            if engine == "transformers":  # on vLLM that would take as long again
                gap = max(gap, trained(final, engine, Path(place) / "second", steps=1)[1])
        except ReplRLError as error:
            return Row(family.name, engine, "failed", " ".join(str(error).replace(place, "").split()), check_s, 0.0)
        return Row(family.name, engine, "trained", "", check_s, gap)


def check(folder: Path, engine: str) -> None:
    """All that is checked of a model before an engine starts.

    Raises:
        ConfigError: it is refused.
    """
    kind = ENGINES.resolve(engine)
    validate_model(folder, kind, CONFIG, frozenset)
    kind.check(EngineOptions(folder, CONTEXT))


CONFIG = TrainerConfig(steps=1, prompts_per_step=2, group_size=2, warmup_steps=0)


def trained(folder: Path, engine: str, out: Path, steps: int) -> tuple[Path, float]:
    """The folder of the policy after some steps, and the largest gap."""
    gaps: list[float] = []

    def told(record: StepRecord, _: object) -> None:
        gaps.append(record.metrics["logprob_gap_max"])

    world = RolloutConfig(
        model=str(folder),
        engine=engine,
        sandbox="unsafe",
        context_tokens=CONTEXT,
        concurrency=4,
        rollout=RolloutLimits(max_lines=4, max_line_tokens=12),
    )
    config = TrainerConfig(steps=steps, prompts_per_step=2, group_size=2, warmup_steps=0)
    return train(world, config, out=out, train_tasks=4, on_step=told), max(gaps)


def play_all(engine: str, names: Sequence[str]) -> list[Row]:
    """Rows of one engine, a line each on standard output."""
    check(find_asset("policies/quickstart"), engine)  # heavy packages are imported here
    rows = []
    for family in ZOO:
        if not names or family.name in names:
            rows.append(play(family, engine))
            print(json.dumps(asdict(rows[-1])), flush=True)
    return rows


def play_apart(engine: str, names: Sequence[str] = ()) -> tuple[list[Row], int]:
    """Rows of one engine, played in a process of its own, and how many tracebacks it wrote."""
    command = [sys.executable, "-m", "benchmarks.models.families", engine, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=dict(os.environ))
    rows = [Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    return rows, done.stdout.count(TRACEBACK) + done.stderr.count(TRACEBACK)


def block(figures: Mapping[str, object]) -> str:
    """Return the generated block of the results."""
    rows = rows_of(figures)
    by = {(row.family, row.engine): row for row in rows}
    counts = [sum(row.engine == name and row.outcome == "trained" for row in rows) for name in ENGINE_NAMES]
    slowest = max(row.check_s for row in rows)
    text = f"{len(ZOO)} families; trained: {counts[0]} on `transformers`, {counts[1]} on `vllm`. A check refuses"
    text += f" all others\nin at most {slowest:.1f} s of CPU time. Raw tracebacks: {figures['tracebacks']}.\n\n"
    text += "| family | `transformers` | `vllm` |\n|---|---|---|\n"
    for family in ZOO:
        cells = [_cell(by[family.name, engine]) for engine in ENGINE_NAMES]
        text += f"| {family.name} | {' | '.join(cells)} |\n"
    return text


def summary(figures: Mapping[str, object]) -> str:
    """Return the generated block of docs/models.md: families by the engines that train them."""
    by = {(row.family, row.engine): row for row in rows_of(figures)}
    groups: dict[str, list[str]] = {}
    for family in ZOO:
        engines = [f"`{name}`" for name in ENGINE_NAMES if by[family.name, name].outcome == "trained"]
        groups.setdefault(" and ".join(engines) or "none", []).append(family.name)
    text = f"{len(ZOO)} families:\n\n| trained on | families |\n|---|---|\n"
    return text + "".join(f"| {engines} | {'; '.join(names)} |\n" for engines, names in groups.items())


def _cell(row: Row) -> str:
    if row.outcome == "trained":
        return f"trained, gap {row.gap:.0e}"
    return f"{row.outcome}: {row.reason}".replace("|", "/").replace("<", "`<`")


def rows_of(figures: Mapping[str, object]) -> list[Row]:
    """The rows among the figures."""
    rows = figures["rows"]
    assert isinstance(rows, list)
    return [Row(**row) for row in rows]


def publish(rows: Sequence[Row], tracebacks: int) -> None:
    """Write the figures and the page."""
    figures = {"tracebacks": tracebacks, "rows": [asdict(row) for row in rows]}
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    PAGE.write(block(figures))
    SUMMARY.write(summary(figures))


def main(arguments: Sequence[str]) -> None:
    """See the top of this file.

    Raises:
        SystemExit: there is no such family.
    """
    names: Sequence[str] = ()
    if arguments and arguments[0] == "--only":
        names = arguments[1:]
        if not names or (unknown := set(names) - {family.name for family in ZOO}):
            raise SystemExit(f"--only is {sorted(unknown) if names else 'empty'}; name families of the zoo")
    elif arguments:
        play_all(arguments[0], arguments[1:])
        return
    played = [play_apart(engine, names) for engine in ENGINE_NAMES]
    rows, tracebacks = [row for rows, _ in played for row in rows], sum(count for _, count in played)
    if names:
        before = json.loads(FIGURES.read_text())
        rows, tracebacks = merge_rows(rows_of(before), rows), tracebacks + before["tracebacks"]
    publish(rows, tracebacks)


def merge_rows(before: Sequence[Row], fresh: Sequence[Row]) -> list[Row]:
    """The rows `before` with the `fresh` ones in their place, engine by engine in the order of the zoo."""
    by = {(row.family, row.engine): row for row in (*before, *fresh)}
    places = [(family.name, engine) for engine in ENGINE_NAMES for family in ZOO]
    return [by[place] for place in places if place in by]


if __name__ == "__main__":
    main(sys.argv[1:])

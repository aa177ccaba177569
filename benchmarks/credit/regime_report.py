"""Write the regimes of the credit experiment: a summary in docs/credit.md, everything in benchmarks/results/credit.md.

`python -m benchmarks.credit.page FILE` writes these blocks if FILE is the report of a regime. The plan comes from the
shipped settings alone, so a page shows it before the regime is run.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks.cli import CreditBenchConfig
from benchmarks.credit import gain_table as buys
from benchmarks.credit.conditions import BASELINE
from benchmarks.credit.experiment import Experiment
from benchmarks.credit.experiment_plan import SPREAD
from benchmarks.credit.findings import DEFAULT, asked_again, conditions, findings, told_again
from benchmarks.credit.power import ALPHA, POWER, smallest_difference
from benchmarks.credit.rows import POINTS
from benchmarks.credit.settings import REGIMES, Settings
from benchmarks.credit.starting_policies import DEMONSTRATIONS_A_STEP
from benchmarks.generated_blocks import RESULTS, ROOT, Block, Report, points, share
from repl_rl.settings.argument_parser import parse
from repl_rl.utils.package_data import find_asset

SUMMARY = Block(ROOT / "docs" / "credit.md", "credit/regime_report")
PAGE = Block(RESULTS / "credit.md", "credit/regime_report")
FIGURES = RESULTS / "credit_regimes.json"
DECIDING = ("noise", "long", "longer", "errors")
"""The regimes in which another condition earns its place."""
LOOKED_AT = ("pretrained", "pretrained_sampled")
"""Those that decide nothing."""
BLOCKS = {
    "train_solve_rate": "solved over the budget",
    "solve_rate": "held out",
    "greedy": "held out, greedy",
    "with_error": "held-out rollouts with an error",
}
KEPT = (
    "settings",
    "versions",
    "policy",
    "fingerprint",
    "workers",
    "cores",
    "busy_s",
    "tuning_s",
    "seeds",
    "target",
    "power",
    "figures",
    "rows",
)


def names() -> list[str]:
    """The shipped regimes that are about credit."""
    return sorted(name for file in find_asset(REGIMES).glob("*.toml") if not (name := file.stem).startswith("stale"))


def planned(name: str) -> tuple[CreditBenchConfig, Experiment]:
    """What a regime says, and the experiment that it is."""
    config = parse(CreditBenchConfig, "bench credit", ["--regime", name], find_asset(REGIMES), "regime")
    settings = Settings(**{field.name: getattr(config, field.name) for field in fields(Settings)})
    return config, Experiment(config.out, settings, config.conditions, config.seeds, spread=config.spread)


def block(reports: Mapping[str, Report]) -> str:
    """Return the generated block of all results: the plan, then each published regime."""
    again = {name: f"- {told_again(*pair)}\n" for name, pair in asked_again(reports).items()}
    found = [_regime(name, reports[name], again.get(name, "")) for name in names() if name in reports]
    return "\n".join([plan(), *([overview(reports)] if reports else []), *found])


def summary(reports: Mapping[str, Report]) -> str:
    """Return the generated block of the summary: the findings of all regimes, and the default preset."""
    found = (part for part in (buys.together(reports), _ruled(reports)) if part)
    return "\n".join(found) if reports else "Nothing is published yet.\n"


def overview(reports: Mapping[str, Report]) -> str:
    """Return a table with one row per regime: its findings, and the difference that its seeds detect."""
    text = "### Findings per regime\n\n"
    text += f"| regime | rollouts per step | tokens per run | seeds | compared | above `{BASELINE}` | below it |"
    text += " detected |\n" + "|---" * 8 + "|\n"
    for name in names():
        config, _ = planned(name)
        cells = [
            f"`{name}`",
            f"{config.prompts_per_step * config.group_size}",
            f"{config.tokens}",
            f"{config.seeds}",
            *(_result_cells(reports[name]) if name in reports else ("", "not run yet", "", "")),
        ]
        text += f"| {' | '.join(cells)} |\n"
    return text + (
        f"\nThe table has the differences to `{BASELINE}` that are found at {ALPHA:.0%} after Holm's correction. They "
        "are points of solve rate over the budget, with 95% intervals. With the measured spread, the seeds detect the "
        f"true difference of the last column {POWER:.0%} of the time.\n"
    )


def _result_cells(report: Report) -> Sequence[str]:
    """Return the cells of a published regime: comparisons, findings above and below the baseline, and detection."""
    found, spread = report["figures"]["conditions"], report["figures"]["spread"]
    compared = f"{sum(figures['holm'] is not None for figures in found.values())}"
    if spread is None or buys.at_floor(report):
        return compared, "not counted", "", ""
    above, below = (
        ", ".join(
            f"`{name}` {points(found[name]['difference']['train_solve_rate'])}"
            for name, value in findings(report).items()
            if sign * value > 0
        )
        for sign in (1, -1)
    )
    return compared, above or "none", below or "none", f"{100 * smallest_difference(spread, report['seeds']):.1f}"


def preset(reports: Mapping[str, Report]) -> str:
    """The condition that the default preset is by the page's rule, of what is published."""
    found: list[tuple[str, str, float, float]] = [
        (name, regime, report["figures"]["conditions"][name]["holm"], value)
        for regime, report in reports.items()
        for name, value in findings(report).items()
        if regime not in LOOKED_AT
    ]
    below = {name for name, _, _, value in found if value < 0}
    above = [(p, name) for name, regime, p, value in found if value > 0 and regime in DECIDING and name not in below]
    if above:
        return min(above)[1]
    return BASELINE if DEFAULT in below else DEFAULT


def _ruled(reports: Mapping[str, Report]) -> str:
    ruled = preset(reports)
    outcome = f"`{DEFAULT}` stays the default preset" if ruled == DEFAULT else f"`{ruled}` replaces `{DEFAULT}`"
    return f"By the decision rule, after {len(reports)} published regimes, {outcome}.\n"


def plan() -> str:
    """The regimes as they are shipped, with how small a difference each detects."""
    text = "| regime | step | learning rate | tokens per run | start | conditions | seeds | detects, points |"
    text += " after Holm |\n|---|---|---|---|---|---|---|---|---|\n"
    for name in names():
        config, experiment = planned(name)
        power = experiment.power
        found = [100 * (detected or 0.0) for detected in (power.smallest, power.smallest_corrected)]  # of several seeds
        rate = f"one of {', '.join(f'{r:g}' for r in config.rates)}" if config.rates else f"{config.learning_rate:g}"
        text += (
            f"| `{name}` | {config.prompts_per_step} tasks x {config.group_size} | {rate} | {config.tokens} | "
            f"{_started(config)} | {len(config.conditions)} | {config.seeds} | {found[0]:.1f} | {found[1]:.1f} |\n"
        )
    text += (
        f"\nA paired t test (two-sided, {ALPHA:.0%}) finds the detected difference of the primary metric {POWER:.0%} "
        "of the time, alone and as the strictest of Holm's. The assumed spread of a difference over seeds is "
        f"{100 * SPREAD:.1f} points, as in the earlier experiment."
    )
    others = {name: config.spread for name in names() if (config := planned(name)[0]).spread != SPREAD}
    text += "".join(f" For `{name}` it is {100 * spread:.1f} points." for name, spread in others.items()) + "\n"
    for name in names():
        config, _ = planned(name)
        text += f"\n`{name}`: " + ", ".join(f"`{condition}`" for condition in config.conditions) + ".\n"
    return text


def _started(config: CreditBenchConfig) -> str:
    if config.start != "shown":
        return config.start
    shown = f"`{Path(config.model).stem}`, {config.shown_steps * DEMONSTRATIONS_A_STEP} demonstrations of "
    return shown + " and ".join(config.families)


def _regime(name: str, report: Report, again: str) -> str:
    settings, found = report["settings"], report["figures"]["conditions"]
    parts = [f"### `{name}`\n", about(report), _table(found), *(f"- {line}" for line in sentences(report))]
    agreed = {condition: figures["agreement"] for condition, figures in found.items() if figures["agreement"]}
    text = "\n".join(parts[:3]) + "\n" + "\n".join(parts[3:]) + "\n" + again
    if agreed:
        text += (
            f"\nGradients of two independent batches of at least {settings['agreement_tokens']} sampled tokens: their "
            "cosine, and the share of a gradient's squared length that is signal.\n\n" + _agreement(agreed)
        )
    return text + (_blocks(report) if {BASELINE, "fenced"} <= found.keys() else "")


def _blocks(report: Report) -> str:
    """Code between fences against lines, both with the outcome alone, and rollouts of each."""
    found, starts = report["figures"]["conditions"], report["figures"]["start"]
    lines, blocks = found[BASELINE], found["fenced"]
    text = "\nBlocks against lines, both with the outcome alone, after training unless noted:\n\n"
    text += "| | line by line | blocks | blocks minus lines, points |\n|---|---|---|---|\n"
    ways = starts["lines"], starts["fenced"]
    text += "| held out, before training |" + "".join(f" {way['solve_rate']:.1%} |" for way in ways) + " |\n"
    tasks = report["settings"]["held_out"]
    begun = (_mended([way], tasks) for way in ways)
    text += (
        "| with an error, before training, and of those, solved |" + "".join(f" {cell} |" for cell in begun) + " |\n"
    )
    for name, label in BLOCKS.items():
        difference = points(blocks["difference"].get(name))
        text += f"| {label} | {share(lines['mean'][name])} | {share(blocks['mean'][name])} | {difference} |\n"
    text += "| with an error in all runs, and of those, solved |"
    for name in (BASELINE, "fenced"):
        text += f" {_mended([row['after'] for row in rows_of(report) if row['condition'] == name], tasks)} |"
    text += " |\n"
    text += f"| tokens until {report['target']:.0%} are solved (runs that get there) |"
    for reached in (lines["reached"], blocks["reached"]):
        text += f" {reached['tokens']['value']:.0f} ({reached['runs']} of {reached['of']}) |"
    text += " |\n"
    first = min(row["seed"] for row in report["rows"] if row["kind"] == "run")
    for name, label in ((BASELINE, "Line by line"), ("fenced", "Blocks")):
        for row in report["rows"]:
            if row["kind"] == "run" and row["condition"] == name and row["seed"] == first:
                text += f"\n{label}, greedy, after training with seed {first}:\n\n"
                text += "\n".join(f"````text\n{told.rstrip()}\n````\n" for told in row["transcripts"])
    return text


def _mended(figures: Sequence[Report], tasks: int) -> str:
    """Rollouts in which a line failed, of so many each time, and how many of them solved their task all the same.

    Together, not as a mean over runs: one without such a rollout says nothing of them.
    """
    failed = sum(round(found["with_error"] * tasks) for found in figures)
    solved = sum(round(found["with_error"] * found["repaired"] * tasks) for found in figures)
    return f"{failed} of {tasks * len(figures)}, {solved}"


def rows_of(report: Report) -> Sequence[Report]:
    """The runs of a report."""
    return [row for row in report["rows"] if row["kind"] == "run"]


def about(report: Report) -> str:
    """How the runs of a report were played."""
    settings, runs = report["settings"], rows_of(report)
    steps = [len(run["tokens"]) for run in runs]
    rate = f"{settings['learning_rate']:g}"
    if settings["rates"]:
        rate = f"tuned per condition in {report['tuning_s'] / 60 / report['workers']:.0f} more minutes"
    return (
        f"{len(runs)} runs, {report['seeds']} seeds per condition, {settings['tokens']} sampled tokens each: "
        f"{min(steps)} to {max(steps)} steps of {settings['prompts_per_step']} tasks x {settings['group_size']} "
        f"rollouts, learning rate {rate}, start {settings['start']}. Engine {settings['engine']}, {report['workers']} "
        f"workers on {report['cores']} cores, {report['busy_s'] / 60 / report['workers']:.0f} minutes each. Policy "
        f"`{report['policy']}`, " + ", ".join(f"{what} {number}" for what, number in report["versions"].items()) + ".\n"
    )


def _table(found: Mapping[str, Report]) -> str:
    text = (
        "| | solved over the budget | difference, points | p | p after Holm | held out | lines in error, held out | "
        "steps |\n|---|---|---|---|---|---|---|---|\n"
    )
    for name, figures in found.items():
        means = figures["mean"]
        cells = [
            share(means["train_solve_rate"]),
            "" if name == BASELINE else points(figures["difference"].get("train_solve_rate")),
            *("" if figures[key] is None else _chance(figures[key]) for key in ("p", "holm")),
            share(means["solve_rate"]),
            share(means["line_error_rate"]),
            f"{means['steps']['value']:.0f}",
        ]
        text += f"| `{name}` |" + "".join(f" {cell} |" for cell in cells) + "\n"
    return text


def _chance(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def sentences(report: Report) -> Iterator[str]:
    """What the figures say, with every number and name from them."""
    found, spread = report["figures"]["conditions"], report["figures"]["spread"]
    tested = [name for name, figures in found.items() if figures["holm"] is not None]
    for sign, what in ((1, "above"), (-1, "below")):
        named = [name for name, value in findings(report).items() if sign * value > 0]
        listed = f" ({', '.join(f'`{name}`' for name in named)})" if named else ""
        verb = "is" if len(named) == 1 else "are"
        yield f"Of {conditions(len(tested))} {len(named)}{listed} {verb} {what} `{BASELINE}` after Holm's correction."
    if buys.at_floor(report):
        yield (
            f"No condition solves {buys.FLOOR:.0%} over the budget. No difference can show so close to 0, and the "
            "small spread is no sign of power. This regime shows nothing (noticed after the runs)."
        )
    if DEFAULT in found:
        difference = found[DEFAULT]["difference"].get("train_solve_rate")
        yield f"`{DEFAULT}`, the default preset: {points(difference)} points."
    if spread is not None and report["seeds"] > 1:
        yield (
            f"Measured spread over seeds: {100 * spread:.1f} points, so these seeds detect "
            f"{100 * smallest_difference(spread, report['seeds']):.1f}."
        )
    rates = {row["condition"]: row["learning_rate"] for row in report["rows"] if row["kind"] == "run"}
    if report["settings"]["rates"]:
        yield "Tuned learning rates: " + ", ".join(f"`{name}` {rate:g}" for name, rate in rates.items()) + "."


def _agreement(agreed: Mapping[str, Report]) -> str:
    heads = [f"{key}, {point}" for key in ("cosine", "signal") for point in POINTS]
    text = "| |" + "".join(f" {head} |" for head in heads) + "\n|---|" + "---|" * len(heads) + "\n"
    for name, found in agreed.items():
        cells = (f"{found[point][key]['value']:.2f}" for key in ("cosine", "signal") for point in POINTS)
        text += f"| `{name}` |" + "".join(f" {cell} |" for cell in cells) + "\n"
    return text


@dataclass(frozen=True, slots=True)
class Published:
    """The reports of regimes that pages show, by regime, in a file of their own."""

    figures: Path
    blocks: Mapping[Block, Callable[[Mapping[str, Report]], str]]
    """What makes each block of them."""

    @property
    def reports(self) -> Mapping[str, Report]:
        """What is shown."""
        return dict(json.loads(self.figures.read_text())) if self.figures.exists() else {}

    def add(self, reports: Sequence[Report]) -> None:
        """Show these too, each in the place of that of its regime; with none, what is shown is written again."""
        kept = {str(r["settings"]["regime"]): {key: r[key] for key in KEPT} for r in reports}
        shown = {**self.reports, **kept}
        texts = [make(shown) for make in self.blocks.values()]  # before anything is written
        self.figures.write_text(json.dumps(shown) + "\n")
        for block, text in zip(self.blocks, texts, strict=True):
            block.write(text)


PUBLISHED = Published(FIGURES, {PAGE: block, SUMMARY: summary, buys.SHORT: buys.block})

if __name__ == "__main__":
    PUBLISHED.add(())

"""Publish the staleness experiment, planned and measured, in benchmarks/results/update.md.

`python -m benchmarks.credit.page FILE` writes this block if FILE is the report of one of the `REGIMES`.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from benchmarks.credit.conditions import BASELINE
from benchmarks.credit.power import ALPHA
from benchmarks.credit.regime_report import Published, about, planned, rows_of
from benchmarks.generated_blocks import RESULTS, Block, Report, points, share

PAGE = Block(RESULTS / "update.md", "credit/staleness_page")
FIGURES = RESULTS / "update_stale.json"
REGIMES = ("stale", "stale_long", "stale_pretrained")


def block(reports: Mapping[str, Report]) -> str:
    """The generated block: what each regime is, and what was found in it where it was published."""
    return "\n".join(_found(name, reports[name]) if name in reports else _planned(name) for name in REGIMES)


def _planned(name: str) -> str:
    config, experiment = planned(name)
    return (
        f"`{name}`: {len(config.conditions)} conditions, {config.seeds} seeds, {config.tokens} sampled tokens per run, "
        f"{config.prompts_per_step} tasks x {config.group_size} rollouts a step, learning rate "
        f"{config.learning_rate:g}, start {config.start}; detects {100 * (experiment.power.smallest or 0):.1f} points. "
        "Not played yet.\n"
    )


def _found(name: str, report: Report) -> str:
    found = report["figures"]["conditions"]
    text = f"`{name}`: {about(report)}\n| | tokens older than the policy, mean | ratios kept | solved over the budget |"
    text += " difference, points | p after Holm | held out | difference, points | held out, greedy |"
    text += " difference, points |\n" + "|---" * 10 + "|\n"
    for condition in sorted(found, key=lambda name: name != BASELINE):
        figures = found[condition]
        runs = [row for row in rows_of(report) if row["condition"] == condition]
        cells = [
            f"{fmean(row['staleness'] for row in runs):.2f} steps",
            f"{fmean(row['kept'] for row in runs):.1%}",
            share(figures["mean"]["train_solve_rate"]),
            "" if condition == BASELINE else points(figures["difference"].get("train_solve_rate")),
            "" if figures["holm"] is None else f"{figures['holm']:.3f}",
            share(figures["mean"]["solve_rate"]),
            "" if condition == BASELINE else points(figures["difference"].get("solve_rate")),
            share(figures["mean"]["greedy"]),
            "" if condition == BASELINE else points(figures["difference"].get("greedy")),
        ]
        text += f"| `{condition}` | " + " | ".join(cells) + " |\n"
    return f"{text}\n{sentence(report)}\n"


def sentence(report: Report) -> str:
    """What the figures say, with every number and name from them."""
    found = {name: f for name, f in report["figures"]["conditions"].items() if f["holm"] is not None}
    over = {name: f["difference"]["train_solve_rate"]["value"] for name, f in found.items() if f["holm"] < ALPHA}
    ends = {name: f["difference"]["solve_rate"] for name, f in found.items()}
    worse = [name for name, d in ends.items() if d["high"] is not None and d["high"] < 0]
    better = [name for name, d in ends.items() if d["low"] is not None and d["low"] > 0]
    below, above = ([name for name, value in over.items() if sign * value > 0] for sign in (-1, 1))
    return (
        f"Of {len(found)} conditions {_named(below)} below fresh rollouts and {_named(above)} above, over the budget "
        f"and after Holm's correction; at the end, on held-out tasks, {_named(worse)} below and {_named(better)} above "
        "by an interval that excludes 0, uncorrected."
    )


def _named(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(f'`{name}`' for name in names)})" if names else "none"


PUBLISHED = Published(FIGURES, {PAGE: block})

if __name__ == "__main__":
    PUBLISHED.add(())

"""Publish reports of `repl-rl bench credit --json FILE`: tables, sentences about them, and a plot.

    python -m benchmarks.credit.page FILE...

Every number of docs/credit.md and benchmarks/results/credit.md is in a generated block and comes from such files. The
report of a regime is added to the blocks of `regime_report` or, for staleness, of `staleness_page`. A report without a
regime is the earlier experiment, which has the block of this script.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.credit import regime_report as regimes
from benchmarks.credit import staleness_page as stale
from benchmarks.credit.conditions import BASELINE, ESTIMATORS, REPORTED_SHAPINGS
from benchmarks.credit.findings import DEFAULT
from benchmarks.credit.statistics import at_tokens, mean, running_mean
from benchmarks.generated_blocks import RESULTS, Block, Report, points, share

PAGE = Block(RESULTS / "credit.md", "credit/page")
FIGURES, PLOT = (RESULTS / f"credit.{kind}" for kind in ("json", "png"))
INK = "#808080"
"""Grey that is read on white and on black."""
COLOURS = {"process": "#d95f02", "two_stream": "#1b9e77", "return_to_go": "#7570b3", "state_anchor": "#e7298a"}
FARMING = {
    "lines_per_rollout": ("lines per rollout", "{:.2f}"),
    "rollout_tokens": ("tokens per rollout", "{:.1f}"),
    "void_line_rate": ("void lines", "{:.1%}"),
    "print_rate": ("prints", "{:.1%}"),
    "try_rate": ("try", "{:.1%}"),
    "repeat_rate": ("repeated lines", "{:.1%}"),
}


def block(report: Report) -> str:
    """Return the generated block of the earlier experiment."""
    found = report["figures"]["conditions"]
    parts = [
        _about(report),
        "Solve rate of training rollouts, mean over the budget (95 % interval over seeds):\n\n"
        + _grid(report, lambda figures: share(figures["mean"]["train_solve_rate"])),
        f"Differences to `{BASELINE}`, paired by seed, in points:\n\n"
        + _grid(report, lambda figures: points(figures["difference"].get("train_solve_rate"))),
        "Several cells together, as differences paired by seed, in points:\n\n" + _effects(report),
        "![solve rate of training rollouts over sampled tokens](credit.png)\n",
        f"Held-out tasks after training, and sampled tokens until {report['window']} training steps solve "
        f"{report['target']:.0%} on average:\n\n" + _ends(report, found),
        "Farming indicators on held-out tasks after training:\n\n" + _farming(report, found),
        "Findings:\n\n" + "".join(f"- {sentence}\n" for sentence in sentences(report)),
    ]
    return "\n".join(parts)


def _about(report: Report) -> str:
    settings, runs = report["settings"], _runs(report)
    steps = [len(run["tokens"]) for run in runs]
    seeds = [figures["reached"]["of"] for figures in report["figures"]["conditions"].values()]
    each = f"{min(seeds)}" if min(seeds) == max(seeds) else f"{min(seeds)} to {max(seeds)}"
    return (
        f"{len(runs)} runs, {each} seeds per condition, {settings['tokens']} sampled tokens per run: {min(steps)} to "
        f"{max(steps)} steps of {settings['prompts_per_step']} tasks x {settings['group_size']} rollouts at a learning "
        f"rate of {settings['learning_rate']:g}. {settings['held_out']} held-out tasks. Engine {settings['engine']}, "
        f"{report['workers']} workers on {report['cores']} cores, "
        f"{report['busy_s'] / 60 / report['workers']:.0f} minutes each. Policy `{report['policy']}`, "
        + ", ".join(f"{name} {number}" for name, number in report["versions"].items())
        + ".\n"
    )


def _grid(report: Report, cell: Callable[[Report], str]) -> str:
    """A table of estimators by shapings."""
    found, same = report["figures"]["conditions"], report["same_as"]
    text = (
        "| |" + "".join(f" {name} |" for name in REPORTED_SHAPINGS) + "\n|---|" + "---|" * len(REPORTED_SHAPINGS) + "\n"
    )
    for estimator in ESTIMATORS:
        names = [f"{estimator}/{shaping}" for shaping in REPORTED_SHAPINGS]
        if not found.keys() & set(names):
            continue
        cells = (
            f"same as `{same[name]}`" if name in same else cell(found[name]) if name in found else "-" for name in names
        )
        text += f"| `{estimator}` |" + "".join(f" {value} |" for value in cells) + "\n"
    if "fenced" in found:
        text += f"| fenced blocks, `outcome` | {cell(found['fenced'])} |" + " |" * (len(REPORTED_SHAPINGS) - 1) + "\n"
    return text


def _effects(report: Report) -> str:
    text = "| | solve rate over the budget | held-out solve rate | held-out lines in error |\n|---|---|---|---|\n"
    for name, figures in report["figures"]["effects"].items():
        cells = (points(figures[key]) for key in ("train_solve_rate", "solve_rate", "line_error_rate"))
        text += f"| {name} |" + "".join(f" {cell} |" for cell in cells) + "\n"
    return text


def _ends(report: Report, found: Report) -> str:
    text = "| | solved, temperature 1 | solved, greedy | lines in error | tokens to reach the target |\n"
    text += "|---|---|---|---|---|\n"
    for way, start in report["figures"]["start"].items():
        text += f"| *start, {way}* | {start['solve_rate']:.1%} | {start['greedy']:.1%} | "
        text += f"{start['line_error_rate']:.1%} | |\n"
    for name, figures in found.items():
        means = figures["mean"]
        cells = [share(means[key]) for key in ("solve_rate", "greedy", "line_error_rate")]
        text += f"| `{name}` |" + "".join(f" {cell} |" for cell in cells) + f" {_reached(figures['reached'])} |\n"
    return text


def _farming(report: Report, found: Report) -> str:
    text = "| |" + "".join(f" {label} |" for label, _ in FARMING.values()) + "\n|---|" + "---|" * len(FARMING) + "\n"
    for way, start in report["figures"]["start"].items():
        text += f"| *start, {way}* |" + "".join(f" {form.format(start[key])} |" for key, (_, form) in FARMING.items())
        text += "\n"
    for name, figures in found.items():
        cells = (form.format(figures["mean"][key]["value"]) for key, (_, form) in FARMING.items())
        text += f"| `{name}` |" + "".join(f" {cell} |" for cell in cells) + "\n"
    return text


def sentences(report: Report) -> Iterator[str]:
    """What the figures say, with every number and name from them."""
    found = report["figures"]["conditions"]
    dense = [name for name in found if name not in (BASELINE, "fenced")]
    for key, what in (
        ("train_solve_rate", "mean solve rate over the budget"),
        ("solve_rate", "held-out solve rate after training"),
        ("line_error_rate", "held-out line error rate after training"),
    ):
        higher, lower = (_certain({name: found[name]["difference"] for name in dense}, key, sign) for sign in (1, -1))
        yield (
            f"{what[0].upper()}{what[1:]}: of {len(dense)} conditions with line credit, {_named(higher)} above "
            f"`{BASELINE}` and {_named(lower)} below it by a 95 % interval that excludes 0; about "
            f"{0.05 * len(dense):.1f} would by chance if there were no difference at all."
        )
    together = report["figures"]["effects"]
    if together:
        higher, lower = (_certain(together, "train_solve_rate", sign) for sign in (1, -1))
        yield (
            f"Several cells together, mean solve rate over the budget: of {len(together)} comparisons {_named(higher)} "
            f"above 0 and {_named(lower)} below 0 by such an interval."
        )
    if DEFAULT in found:
        difference = found[DEFAULT]["difference"]["train_solve_rate"]
        yield f"`{DEFAULT}`, the default preset: {points(difference)} points against `{BASELINE}` over the budget."
    complete = {name: f["reached"] for name, f in found.items() if f["reached"]["runs"] == f["reached"]["of"]}
    if complete:
        first = min(complete, key=lambda name: complete[name]["tokens"]["value"])
        yield (
            f"Fewest tokens to the target: `{first}` with {_reached(found[first]['reached'])}; `{BASELINE}`: "
            f"{_reached(found[BASELINE]['reached'])}."
        )
    if "fenced" in found:
        lines, fenced = (report["figures"]["start"][way] for way in ("lines", "fenced"))
        yield (
            f"Fenced blocks start from another policy, which solves {fenced['solve_rate']:.1%} where the bundled one "
            f"solves {lines['solve_rate']:.1%}, with {fenced['rollout_tokens']:.1f} tokens per rollout instead of "
            f"{lines['rollout_tokens']:.1f}. After the same tokens: {share(found['fenced']['mean']['solve_rate'])} "
            f"against {share(found[BASELINE]['mean']['solve_rate'])}."
        )
    gap = max(run["gap"] for run in _runs(report))
    yield f"Largest gap of one log probability between sampler and trainer, over all runs: {gap:.1e} nats."


def _certain(differences: Mapping[str, Report], key: str, sign: int) -> list[str]:
    """Names whose difference has an interval on this side of 0."""
    pairs = ((name, figures.get(key)) for name, figures in differences.items())
    return [n for n, d in pairs if d and d["low"] is not None and min(sign * d["low"], sign * d["high"]) > 0]


def _named(names: Sequence[str]) -> str:
    listed = ", ".join(f"`{name}`" for name in names)
    return f"{len(names)} {'is' if len(names) == 1 else 'are'}" + (f" ({listed})" if names else "")


def _reached(reached: Report) -> str:
    tokens = reached["tokens"]
    if not reached["runs"]:
        return "not reached"
    value = f"{tokens['value']:.0f}"
    if reached["runs"] < reached["of"]:
        return f"at least {value}: reached by {reached['runs']} of {reached['of']}"
    return value if tokens["low"] is None else f"{value} ± {tokens['high'] - tokens['value']:.0f}"


def _runs(report: Report) -> list[Report]:
    return [row for row in report["rows"] if row["kind"] == "run"]


def draw(report: Report, path: Path) -> None:
    """Solve rate over sampled tokens: a panel for each shaping, and one for fenced blocks."""
    figure = Figure(figsize=(11, 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, sharex=True, sharey=True).flat
    grid = [round(report["settings"]["tokens"] * n / 80) for n in range(1, 81)]
    for axes, shaping in zip(panels, (*REPORTED_SHAPINGS, "fenced"), strict=True):
        _curve(axes, report, BASELINE, INK, grid)
        if shaping == "fenced":
            _curve(axes, report, "fenced", "#1f78b4", grid)
        for estimator, colour in COLOURS.items():
            _curve(axes, report, f"{estimator}/{shaping}", colour, grid)
        axes.set_title("fenced blocks" if shaping == "fenced" else f"shaping: {shaping}", color=INK)
        axes.legend(loc="center right" if shaping == "fenced" else "lower right", frameon=False, labelcolor=INK)
        axes.tick_params(colors=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(INK)
        axes.axhline(report["target"], color=INK, linewidth=0.6, linestyle=":")
        axes.set_ylim(0, 1)
    figure.supxlabel("sampled tokens", color=INK)
    figure.supylabel(f"training rollouts solved, mean of {report['window']} steps", color=INK)
    figure.savefig(path, dpi=110, transparent=True)


def _curve(axes: Axes, report: Report, name: str, colour: str, grid: Sequence[int]) -> None:
    """Mean of the seeds with its 95 % interval."""
    runs = [run for run in _runs(report) if run["condition"] == name]
    if not runs:
        return
    curves = [at_tokens(run["tokens"], running_mean(run["solve"], report["window"]), grid) for run in runs]
    means = [mean(values) for values in zip(*curves, strict=True)]
    axes.plot(grid, [m.value for m in means], color=colour, label=name.partition("/")[0], linewidth=1.6)
    if len(runs) > 1:
        low, high = zip(*((m.low or 0.0, m.high or 0.0) for m in means), strict=True)  # several runs have both
        axes.fill_between(grid, low, high, color=colour, alpha=0.12, linewidth=0)


def main(files: Sequence[Path]) -> None:
    """Publish the figures in `files`."""
    reports = [json.loads(file.read_text()) for file in files]
    named = [report for report in reports if report["settings"].get("regime")]
    for owner in (regimes, stale):
        if own := [report for report in named if (report["settings"]["regime"] in stale.REGIMES) is (owner is stale)]:
            owner.PUBLISHED.add(own)
    for report in reports:
        if not report["settings"].get("regime"):
            FIGURES.write_text(json.dumps(report) + "\n")
            draw(report, PLOT)
            PAGE.write(block(report))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])

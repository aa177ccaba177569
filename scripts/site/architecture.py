"""The packages of repl_rl as their imports say, and a drawing of them.

python -m scripts.site.architecture docs/house.svg    write the drawing as a file
"""

import argparse
import ast
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from graphlib import TopologicalSorter
from html import escape
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2] / "repl_rl"

FLOORS = (
    ("errors",),
    ("deprecations", "utils"),
    ("settings", "tasks"),
    ("trajectory", "models"),
    ("engine", "sandbox", "credit"),
    ("judges",),
    ("rollout",),
    ("ray", "samplers"),
    ("rollout_config", "serve", "sft", "integrations"),
    ("runs",),
    ("trainer", "evaluation"),
    ("doctor_gpu",),
    ("cli",),
)
"""From the ground up. A room imports from its own floor or from those below, and two rooms never import each other."""

Plan = Mapping[str, Set[str]]
"""Room -> the other rooms that it imports."""


def room(path: Path) -> str:
    """The room of a file of the package."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports() -> dict[str, set[str]]:
    """Room -> rooms that it imports, itself among them."""
    found: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        if room(path) in ("__init__", "policies"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module] if node.module != "repl_rl" else [f"repl_rl.{a.name}" for a in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                if name.startswith("repl_rl."):
                    found.setdefault(room(path), set()).add(name.split(".")[1])
    return found


def plan() -> Plan:
    """The house without what rooms import of themselves."""
    found = imports()
    return {name: found.get(name, set()) - {name} for floor in FLOORS for name in floor}


def arrows(plan: Plan) -> dict[str, list[str]]:
    """Of each room the imports that do not follow from others: what a room that it imports has below it is left out."""
    below: dict[str, set[str]] = {}
    for name in TopologicalSorter(plan).static_order():
        below[name] = set(plan[name]).union(*(below[other] for other in plan[name]))
    return {
        name: sorted(other for other in others if not any(other in below[third] for third in others))
        for name, others in plan.items()
    }


BOX, HIGH, GAP, STOREY = 112, 34, 26, 74
"""Pixels: a room's width and height, what is between two beside each other, and from floor to floor."""
_BEND = "\N{MIDDLE DOT}"
"""Begins the name of a place where an arrow passes a floor."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything stands: arrows that pass floors have a place on each of them."""

    rows: Sequence[Sequence[str]]
    """Rooms and places of arrows on each floor, from the roof down, from left to right."""
    paths: Sequence[Sequence[str]]
    """Each arrow: a room, the places that it passes, a room."""

    def places(self) -> dict[str, tuple[float, float]]:
        """The middle of each room and place, in pixels; x is 0 in the middle of the house."""
        found = {}
        for number, row in enumerate(self.rows):
            widths = [GAP / 2 if name.startswith(_BEND) else BOX for name in row]
            left = -(sum(widths) + GAP * (len(row) - 1)) / 2
            for name, width in zip(row, widths, strict=True):
                found[name] = (left + width / 2, number * STOREY + HIGH / 2)
                left += width + GAP
        return found


def laid_out(plan: Plan) -> Layout:
    """The floors, each ordered so that arrows are short and seldom cross."""
    rows = [list(floor) for floor in reversed(FLOORS)]
    row_of = {name: number for number, row in enumerate(rows) for name in row}
    paths: list[list[str]] = []
    for name, others in arrows(plan).items():
        for other in others:
            between = range(row_of[name] + 1, row_of[other])
            bends = {number: f"{_BEND}{name} {other} {number}" for number in between}
            for number, bend in bends.items():
                rows[number].append(bend)
            paths.append([name, *bends.values(), other])
    linked: dict[str, list[str]] = {name: [] for row in rows for name in row}
    for path in paths:
        for upper, lower in pairwise(path):
            linked[upper].append(lower)
            linked[lower].append(upper)
    for sweep in range(8):
        downwards = sweep % 2 == 0
        for before, row in pairwise(rows if downwards else rows[::-1]):
            _order(row, linked, Layout([before], []).places())
    return Layout(rows, paths)


def _order(row: list[str], linked: Mapping[str, Sequence[str]], beside: Mapping[str, tuple[float, float]]) -> None:
    """Order a row by the middle of what each of it is linked to in the row beside it."""

    def middle(name: str) -> float:
        found = [beside[other][0] for other in linked[name] if other in beside]
        return sum(found) / len(found) if found else 0.0

    row.sort(key=middle)


def drawn(plan: Plan, about: Mapping[str, str], pages: Mapping[str, str]) -> str:
    """The house as one SVG element without a blank line, which HTML and Markdown may hold.

    Args:
        plan: the rooms and their imports.
        about: what a room is, in a sentence, by its name.
        pages: the address of a room's page, for those that have one.
    """
    layout = laid_out(plan)
    places = layout.places()
    left = min(x for x, _ in places.values()) - BOX / 2 - GAP
    width, height = -2 * left, STOREY * len(layout.rows) - STOREY + HIGH
    told = f"The rooms of the house on {len(layout.rows)} floors, with an arrow from each to what it imports"
    parts = [
        f'<svg class="house" viewBox="{left:g} -4 {width:g} {height + 8:g}" role="img" aria-label="{told}">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z"/></marker></defs>',
    ]
    parts += [_arrow([places[name] for name in path]) for path in layout.paths]
    for name in plan:
        x, y = places[name]
        room = (
            f"<g><title>{escape(about.get(name, name))}</title>"
            f'<rect x="{x - BOX / 2:g}" y="{y - HIGH / 2:g}" width="{BOX}" height="{HIGH}" rx="5"/>'
            f'<text x="{x:g}" y="{y + 5:g}">{escape(name)}</text></g>'
        )
        parts.append(f'<a href="{pages[name]}">{room}</a>' if name in pages else room)
    return "\n".join([*parts, "</svg>"])


def _arrow(places: Sequence[tuple[float, float]]) -> str:
    """A line through places, from the foot of the first to the head of the last."""
    (x, y), (end_x, end_y) = places[0], places[-1]
    points = [(x, y + HIGH / 2), *places[1:-1], (end_x, end_y - HIGH / 2)]
    bends = [f"M{points[0][0]:g} {points[0][1]:g}"]
    for (x, y), (to_x, to_y) in pairwise(points):
        half = (y + to_y) / 2
        bends.append(f"C{x:g} {half:g} {to_x:g} {half:g} {to_x:g} {to_y:g}")
    return f'<path class="arrow" d="{" ".join(bends)}" marker-end="url(#tip)"/>'


_INLINE_STYLE = """<style>
rect { fill: #4051b5; }
text { fill: #fff; font: 15px system-ui, sans-serif; text-anchor: middle; }
.arrow { fill: none; stroke: #8a8f98; stroke-width: 1.2; }
marker path { fill: #8a8f98; }
</style>"""
"""Colours that can be read on a white and on a dark background."""


def draw_file(plan: Plan) -> str:
    """Return the drawing as the text of an SVG file, which needs no style sheet and has no links."""
    head, _, rest = drawn(plan, {}, {}).partition("\n")
    head = head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" width="440" ')
    return "\n".join([head, _INLINE_STYLE, rest, ""])


def main(argv: list[str]) -> int:
    """Write the drawing to the file that the command names. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Draw the packages of repl_rl, with an arrow for each import.")
    parser.add_argument("file", type=Path, help="SVG file to write, such as docs/house.svg")
    parser.parse_args(argv).file.write_text(draw_file(plan()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

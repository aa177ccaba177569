"""Pages about every public name: the rooms in which they live, each with its names."""

import ast
from collections.abc import Mapping
from pathlib import Path

from scripts.site.architecture import FLOORS, ROOT

FOLDER = "reference/names"


def homes() -> dict[str, list[str]]:
    """The public names of each room, as `repl_rl/__init__.pyi` says them to type checkers."""
    found: dict[str, list[str]] = {}
    for node in ast.parse((ROOT / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("repl_rl."):
            found.setdefault(node.module.split(".")[1], []).extend(alias.name for alias in node.names)
    return {room: sorted(found[room]) for floor in reversed(FLOORS) for room in floor if room in found}


def summary(room: str) -> str:
    """What a room is: the first paragraph of its docstring."""
    path = ROOT / room / "__init__.py"
    text = ast.get_docstring(ast.parse((path if path.exists() else Path(f"{ROOT / room}.py")).read_text()))
    return " ".join((text or "").partition("\n\n")[0].split())


def pages() -> Mapping[str, str]:
    """A page for each room that has public names, and one that lists all of them."""
    rooms = homes()
    rows = [
        f"| [{room}]({room}.md) | {', '.join(f'[`{name}`][repl_rl.{name}]' for name in names)} |"
        for room, names in rooms.items()
    ]
    count = sum(map(len, rooms.values()))
    told = f"The {count} names that `repl_rl` exports, by the room of [the house](../../design.md) in which they live."
    index = ["# Public names", "", told, "", "| room | names |", "|---|---|", *rows, ""]
    return {
        f"{FOLDER}/index.md": "\n".join(index),
        **{
            f"{FOLDER}/{room}.md": "\n\n".join([f"# {room}", summary(room), *(f"::: repl_rl.{n}" for n in names)])
            for room, names in rooms.items()
        },
    }

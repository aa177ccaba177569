"""The house: imports flow down the floors, and `import repl_rl` stays light."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent / "repl_rl"

FLOORS = [
    {"errors"},
    {"machine", "settings", "tasks"},
    {"record", "engine", "origin"},
    {"sandbox", "credit"},
    {"judges"},
    {"rollout"},
    {"samplers"},
    {"world"},
    {"runs"},
    {"trainer", "evaluation", "coldstart"},
    {"lab"},
    {"cli"},
]
"""From the ground up. A room imports from its own floor or from those below, and two rooms never import each other."""

FLOOR = {room: number for number, floor in enumerate(FLOORS) for room in floor}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports() -> dict[str, set[str]]:
    """Room -> rooms that it imports."""
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


def test_every_room_has_a_floor() -> None:
    rooms = {room(path) for path in ROOT.rglob("*.py")} - {"__init__", "policies"}
    assert rooms == set(FLOOR)


def test_imports_flow_down_the_floors() -> None:
    upwards = {(mine, other) for mine, others in imports().items() for other in others if FLOOR[other] > FLOOR[mine]}
    assert upwards == set()


def test_no_two_rooms_import_each_other_even_at_a_distance() -> None:
    graph = {mine: others - {mine} for mine, others in imports().items()}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_the_plan_stays_small() -> None:
    graph = imports()
    assert len(FLOOR) <= 22
    assert sum(len(others - {mine}) for mine, others in graph.items()) <= 110


def test_engines_and_sandboxes_do_not_know_each_other() -> None:
    graph = imports()
    assert "engine" not in graph["sandbox"]
    assert "sandbox" not in graph["engine"]


def test_what_runs_inside_a_sandbox_imports_nothing_of_repl_rl() -> None:
    for path in (ROOT.parent / "sandbox").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] == "repl_rl" for name in names), path


def test_import_repl_rl_is_light() -> None:
    heavy = ("torch", "vllm", "transformers", "trl", "docker", "zmq", "numpy")
    code = f"import repl_rl, sys; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_imported() -> None:
    import repl_rl

    for name in repl_rl.__all__:
        assert getattr(repl_rl, name) is not None


def test_no_type_checking_blocks_and_no_explicit_any() -> None:
    for path in ROOT.rglob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert not names & {"TYPE_CHECKING", "Any"}, path

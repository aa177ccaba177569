"""The house: imports flow down the floors, and `import repl_rl` stays light."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

from website.house import FLOORS, ROOT, imports, room

FLOOR = {room: number for number, floor in enumerate(FLOORS) for room in floor}


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


def test_no_file_and_no_function_outgrows_the_house() -> None:
    """A longer one lacks an idea (CONTRIBUTING.md). The docstring of a public name counts, too."""
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 300, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 80, f"{path}: {node.name}"


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


def test_ray_is_imported_in_three_files() -> None:
    """Whoever wants actors asks `machine/actors.py`, so what of Ray is no stable interface is in one place."""
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.split(".")[0] == "ray" for name in names):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == {"machine/actors.py", "machine/cluster.py", "machine/own_machines.py"}


def test_import_repl_rl_is_light() -> None:
    heavy = ("torch", "vllm", "transformers", "trl", "docker", "zmq", "numpy", "ray", "fastapi", "pydantic")
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


def test_the_type_checker_is_told_to_ignore_nothing() -> None:
    for path in (*ROOT.rglob("*.py"), *(ROOT.parent / "sandbox").rglob("*.py")):
        assert "# type: " + "ignore" not in path.read_text(), path


TESTS = Path(__file__).parent
PATCHES = {
    "tempdir": "the standard library keeps a process's temporary folder there",
    "stdin": "what a terminal types",
    "stdout": "what a terminal shows",
    "find_spec": "a package that is installed cannot be missing otherwise",
    "columns": "which rows an update is made of is in no record of it",
    "_greedy": "vLLM cannot be made to lie",
    "_CANCEL_S": "a sampler that hangs is given five seconds, which a test would sit out",
    "_get_per_token_logps_and_entropies": "the gradient of each token alone, which every model mixes with others",
}
"""What tests may set for a while: the end of its name -> why."""


def nodes() -> list[tuple[Path, ast.AST]]:
    """The syntax of every test."""
    paths = sorted(TESTS.rglob("*.py"))
    return [(path, node) for path in paths for node in ast.walk(ast.parse(path.read_text()))]


def patched(node: ast.AST) -> str | None:
    """The name that a test sets for a while, or in an object's `__dict__`; None: it does no such thing."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and "__dict__" in ast.unparse(node.value):
        return ast.unparse(node.slice).strip("'")
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    if node.func.attr not in ("setattr", "delattr", "setitem", "delitem") or "patch" not in ast.unparse(
        node.func.value
    ):
        return None
    name = node.args[0] if len(node.args) < 3 else node.args[1]
    return ast.unparse(name).strip("'").rpartition(".")[2]


def test_no_test_sleeps() -> None:
    """`asyncio.sleep(0)` only lets the event loop turn. `tests/users.py` is code of a user, which may hang."""
    asleep = [
        f"{path}:{node.lineno}"
        for path, node in nodes()
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] == "sleep"
        and ast.unparse(node.args[0]) != "0"
        and path.name != "users.py"
    ]
    assert asleep == []


def test_the_quick_suite_names_files_that_are_there_once_each_and_in_order() -> None:
    named = (TESTS / "quick.txt").read_text().split()
    assert named == sorted(set(named))
    assert [name for name in named if not (ROOT.parent / name).is_file()] == []


def test_tests_patch_no_code_without_a_reason() -> None:
    assert {name for _, node in nodes() if (name := patched(node)) is not None} == set(PATCHES)


def test_tests_use_no_mocks() -> None:
    for path in TESTS.rglob("*.py"):
        assert not re.search(r"^\s*(from|import) .*\bmock\b", path.read_text(), re.MULTILINE), path

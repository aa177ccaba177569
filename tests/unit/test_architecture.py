"""The house: imports flow down the floors, and `import repl_rl` stays light."""

import ast
import re
from collections.abc import Mapping, Set
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from scripts.site.architecture import FLOORS, ROOT, imports, room

FLOOR = {room: number for number, floor in enumerate(FLOORS) for room in floor}
TESTS = Path(__file__).parents[1]


@cache
def texts(folder: Path) -> list[tuple[Path, str]]:
    """Every file below a folder with its text."""
    return [(path, path.read_text()) for path in sorted(folder.rglob("*.py"))]


@cache
def syntax(folder: Path, *words: str) -> list[tuple[Path, str, list[ast.AST]]]:
    """Every file below a folder with text and syntax, read once; with `words`, the files that have one of them."""
    found = [(path, text) for path, text in texts(folder) if not words or any(word in text for word in words)]
    return [(path, text, list(ast.walk(ast.parse(text)))) for path, text in found]


@cache
def graph() -> Mapping[str, Set[str]]:
    """Room -> the rooms that it imports, itself among them."""
    return imports()


def test_every_room_has_a_floor() -> None:
    rooms = {room(path) for path in ROOT.rglob("*.py")} - {"__init__", "policies"}
    assert rooms == set(FLOOR)


def test_imports_flow_down_the_floors() -> None:
    upwards = {(mine, other) for mine, others in graph().items() for other in others if FLOOR[other] > FLOOR[mine]}
    assert upwards == set()


def test_no_two_rooms_import_each_other_even_at_a_distance() -> None:
    others = {mine: others - {mine} for mine, others in graph().items()}
    assert list(TopologicalSorter(others).static_order())  # raises CycleError


def test_the_plan_stays_small() -> None:
    assert len(FLOOR) <= 24
    # Each room with public classes imports `deprecations`, until the old names are removed.
    assert sum(len(others - {mine, "deprecations"}) for mine, others in graph().items()) <= 145


def code_lines(text: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function that are neither blank, nor a comment, nor of its docstring."""
    first = function.body[0]
    has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = set(range(first.lineno, (first.end_lineno or 0) + 1)) if has_docstring else set()
    numbers = range(function.lineno, (function.end_lineno or 0) + 1)
    lines = text.splitlines()
    return sum(
        number not in docstring and bool(line := lines[number - 1].strip()) and line[0] != "#" for number in numbers
    )


def test_no_file_and_no_function_outgrows_the_house() -> None:
    """Split by idea, never by length: these are the lengths beyond which an idea is surely missing."""
    for path, text, nodes in syntax(ROOT):
        assert len(text.splitlines()) <= 1000, path
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert code_lines(text, node) <= 80, f"{path}: {node.name}"


def test_engines_and_sandboxes_do_not_know_each_other() -> None:
    assert "engine" not in graph()["sandbox"]
    assert "sandbox" not in graph()["engine"]


def test_what_runs_inside_a_sandbox_imports_nothing_of_repl_rl() -> None:
    for path, _, nodes in syntax(ROOT.parent / "sandbox"):
        for node in nodes:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] == "repl_rl" for name in names), path


def test_no_other_room_imports_or_names_an_integration() -> None:
    """Integrations are found as any installed package is. `repl_rl.EnvironmentSampler` stays a public name."""
    assert {mine for mine, others in graph().items() if "integrations" in others} == {"integrations"}
    named = {
        path.relative_to(ROOT).as_posix()
        for path, text, _ in syntax(ROOT)
        if re.search("verifiers|openenv|repl_rl.integrations", text, re.IGNORECASE)
    }
    assert {name for name in named if not name.startswith("integrations/")} == {"deprecations/old_names.py"}


def test_ray_is_imported_in_three_files() -> None:
    """Whoever wants actors asks `ray/actor_calls.py`, so what of Ray is no stable interface is in one place."""
    found = set()
    for path, _, nodes in syntax(ROOT):
        for node in nodes:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.split(".")[0] == "ray" for name in names):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == {"ray/actor_calls.py", "ray/connect_cluster.py", "ray/start_local_cluster.py"}


def test_no_type_checking_blocks_and_no_explicit_any() -> None:
    for path, _, nodes in syntax(ROOT):
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert not names & {"TYPE_CHECKING", "Any"}, path


def test_an_import_inside_a_function_says_why_it_is_not_at_the_top() -> None:
    """On its own line or above; a reason holds for the imports right below it, too."""
    for path, text, nodes in syntax(ROOT):
        lines = text.splitlines()
        for node in nodes:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            inside = [each for each in ast.walk(node) if isinstance(each, ast.Import | ast.ImportFrom)]
            told = 0
            for each in sorted(inside, key=lambda found: found.lineno):
                own = any("  # " in line for line in lines[each.lineno - 1 : each.end_lineno])
                before = [line.strip() for line in lines[told or node.lineno : each.lineno - 1] if line.strip()]
                said = own or bool(before and before[-1].startswith("# ")) or bool(told and not before)
                assert said, f"{path}:{each.lineno}: say why it is imported here"
                told = each.end_lineno or each.lineno


def test_the_type_checker_is_told_to_ignore_nothing() -> None:
    for path, text, _ in (*syntax(ROOT), *syntax(ROOT.parent / "sandbox")):
        assert "# type: " + "ignore" not in text, path


PATCHES = {
    "tempdir": "the standard library keeps a process's temporary folder there",
    "stdin": "what a terminal types",
    "stdout": "what a terminal shows",
    "find_spec": "a package that is installed cannot be missing otherwise",
    "exchange_names": "a file system that exchanges no names is not at hand",
    "metadata": "accelerate parses that of PEFT several times in each step of a training",
    "build_token_columns": "which rows an update is made of is in no record of it",
    "_sample_greedy": "vLLM cannot be made to lie",
    "APPLY_S": "a chat template without end is given five seconds of CPU time, which a test would sit out",
    "_CANCEL_S": "a sampler that hangs is given five seconds, which a test would sit out",
    "_get_per_token_logps_and_entropies": "the gradient of each token alone, which every model mixes with others",
}
"""What tests may set for a while: the end of its name -> why."""


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
    """`asyncio.sleep(0)` only lets the event loop turn. `user_judges.py` is code of a user, which may hang."""
    asleep = [
        f"{path}:{node.lineno}"
        for path, _, nodes in syntax(TESTS, "sleep")
        for node in nodes
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) == "sleep"
        and ast.unparse(node.args[0]) != "0"
        and path.name != "user_judges.py"
    ]
    assert asleep == []


def test_tests_patch_no_code_without_a_reason() -> None:
    patching = syntax(TESTS, "setattr", "delattr", "setitem", "delitem", "__dict__")
    assert {name for _, _, nodes in patching for node in nodes if (name := patched(node))} == set(PATCHES)


def test_tests_use_no_mocks() -> None:
    for path, text in texts(TESTS):
        assert not re.search(r"^\s*(from|import) .*\bmock\b", text, re.MULTILINE), path

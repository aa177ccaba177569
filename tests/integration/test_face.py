"""The public names: typed for checkers, imported late for programs, and the same for both."""

import ast
import inspect
import subprocess
import sys
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import FunctionType

import repl_rl

STUB = Path(repl_rl.__file__).with_suffix(".pyi")
HOMES = {
    alias.asname: (node.module, alias.name)
    for node in ast.parse(STUB.read_text()).body
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
    if alias.asname
}
"""Name -> the module that the stub imports it from, and its name there."""


def in_a_fresh_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_the_stub_and_the_module_list_the_same_names() -> None:
    (listed,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(STUB.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert sorted(listed) == sorted(HOMES) == repl_rl.__all__
    assert set(dir(repl_rl)) >= set(listed)


def test_a_name_of_the_stub_is_the_object_of_the_module() -> None:
    for name, (module, original) in HOMES.items():
        assert name == original
        assert getattr(repl_rl, name) is getattr(import_module(module), name), name
        assert vars(repl_rl)["_HOMES"][name] == module.removeprefix("repl_rl."), name


def test_every_public_class_and_its_methods_say_what_they_promise() -> None:
    """What overrides another one promises what that does, unless it says more."""
    silent = []
    for name in HOMES:
        kind = getattr(repl_rl, name)
        if not isinstance(kind, type):
            continue
        if not kind.__doc__ or kind.__doc__.startswith(f"{name}("):  # what `dataclass` says of one without
            silent.append(name)
        ours = [base for base in kind.__mro__ if base.__module__.startswith("repl_rl.")]
        for member in {member for base in ours for member in vars(base) if not member.startswith("_")}:
            found = inspect.getattr_static(kind, member)
            said = inspect.getdoc(found) or inspect.getdoc(getattr(kind, member, None))
            if not said and isinstance(found, FunctionType | classmethod | staticmethod | property | cached_property):
                silent.append(f"{name}.{member}")
    assert silent == []


def test_no_public_name_is_hidden_by_a_module_of_that_name() -> None:
    rooms = {path.stem for path in STUB.parent.iterdir()}
    assert not rooms & set(repl_rl.__all__)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    code = "import repl_rl\ntry:\n    repl_rl.nothing\nexcept AttributeError as error:\n    print(error)"
    assert in_a_fresh_python(code) == "module 'repl_rl' has no attribute 'nothing'"


def test_import_repl_rl_takes_less_than_half_a_second_of_cpu_and_no_torch() -> None:
    clock = "from time import process_time as t; start = t(); import repl_rl; took = t() - start"
    took, torch = in_a_fresh_python(f"{clock}; import sys; print(took, 'torch' in sys.modules)").split()
    assert float(took) < 0.5
    assert torch == "False"

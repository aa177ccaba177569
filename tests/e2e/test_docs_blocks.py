"""Every code block of every page of the site is of a kind that a test runs, reads or type-checks."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from repl_rl.cli.train import TrainConfig
from repl_rl.settings.argument_parser import parse
from repl_rl.utils.package_data import find_asset
from scripts.site.pages import WRITTEN
from tests.support.documents import PAGES, ROOT, SITE, fenced

KINDS = {
    "python": "test_pages_types.py type-checks it; the test of its page runs it",
    "openenv": "integrations/test_openenv.py plays it",
    "verifiers": "integrations/test_verifiers.py plays it, integrations/test_verifiers_on_vllm.py trains with it",
    "inspect": "bench/test_harness.py runs it",
    "sh": "test_docs_commands.py runs what begins with repl-rl; the rest is read here",
    "bash": "read here: it needs a cluster",
    "toml": "read here",
    "yaml": "read here: it needs a cluster",
    "json": "read here; test_docs_howto.py loads it",
    "text": "what a console or a program shows, and commands of other programs, which are read here",
    "": "what a console shows, which benchmarks wrote",
}
"""Languages of blocks -> what holds them."""


def told(language: str) -> list[tuple[str, str]]:
    """The blocks of a language, each with its page."""
    return [(page, source) for page, text in SITE.items() for each, source in fenced(text) if each == language]


def lines(source: str) -> list[list[str]]:
    """The words of each command of a block, without comments."""
    joined = source.replace("\\\n", " ").splitlines()
    return [words for line in joined if (words := shlex.split(line, comments=True))]


def test_every_block_is_of_a_kind_that_something_holds() -> None:
    assert {language for text in SITE.values() for language, _ in fenced(text)} == set(KINDS)


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    """Pages of names and settings are added to their sections while the site is built."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\nnot_in_nav:")[0]
    sections = re.findall(r"^  - (\w+):$", navigation, re.MULTILINE)
    assert sections == ["Start", "Guides", "Concepts", "Reference", "Results"]
    listed = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", navigation, re.MULTILINE)
    outside = {*WRITTEN, "notebooks/index.md", "source/examples/minimal_grpo.py.md"}
    outside |= {f"notebooks/{path.stem}.md" for path in ROOT.glob("notebooks/*.ipynb")}
    assert sorted(listed) == sorted(outside | {page[5:] for page in SITE if page.startswith("docs/")})


def test_pages_that_are_not_in_docs_have_no_blocks_that_would_be_run_nowhere() -> None:
    assert [name for name, text in SITE.items() if name not in PAGES and fenced(text)] == []


def known(words: list[str]) -> bool:
    """Whether a command of a page is one that can be had, or sets what such a one reads."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    match words:
        case ["repl-rl", *_] | ["export", _] | ["curl", *_]:
            return True
        case ["make", target]:
            return target in targets
        case ["python", "-m", module, *_]:
            return importlib.util.find_spec(module) is not None
        case ["pip", "install", wanted]:
            return wanted.partition("[")[2].removesuffix("]") in extras
    return False


@pytest.mark.parametrize(("page", "source"), told("sh"))
def test_every_line_of_a_shell_block_is_a_command_that_there_is(page: str, source: str) -> None:
    assert [words for words in lines(source) if not known(words)] == []


def test_a_command_that_there_is_not_is_seen() -> None:
    assert not known(["make", "coffee"])
    assert not known(["python", "-m", "benchmarks.nothing"])
    assert not known(["pip", "install", "repl_rl[everything]"])
    assert not known(["rm", "-rf", "runs"])


@pytest.mark.parametrize(("page", "source"), told("bash"))
def test_a_script_is_one_and_its_run_is_accepted(page: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["bash", "-n"], input=source, text=True, check=True)
    (run,) = [words for words in lines(source) if "repl-rl" in words]
    _, verb, *flags = run[run.index("repl-rl") :]
    assert verb == "train"
    assert parse(TrainConfig, verb, flags).workers


LAUNCHED = [
    shlex.split(line)
    for page, source in told("text")
    for line in source.replace("\\\n", " ").splitlines()
    if re.match(r"(torchrun|accelerate|repl-rl|python -m) ", line) and "train_mine.py" not in line
]


def test_what_other_programs_launch_is_accepted() -> None:
    assert len(LAUNCHED) >= 4
    for words in LAUNCHED:
        if words[:2] == ["python", "-m"]:
            assert known(words), words
        elif "train" in words:
            assert parse(TrainConfig, "train", words[words.index("train") + 1 :]), words


DECLARED = "[project.entry-points."
"""Begins a part of a package's `pyproject.toml`."""


@pytest.mark.parametrize("source", [source for _, source in told("toml") if source.startswith(DECLARED)])
def test_entry_points_of_a_page_are_of_groups_that_are_read(source: str) -> None:
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(tomllib.loads(source)["project"]["entry-points"]) <= set(ours)


@pytest.mark.parametrize(("page", "source"), [each for each in told("toml") if not each[1].startswith(DECLARED)])
def test_every_file_of_settings_is_accepted(
    page: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_samplers.py").write_text("def halves(turns):\n    return turns\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.toml").write_text(source)
    assert parse(TrainConfig, "train", ["--config", str(tmp_path / "mine.toml")], presets=find_asset("presets"))
    sys.modules.pop("my_samplers", None)


@pytest.mark.parametrize(("page", "source"), told("json"))
def test_every_line_of_json_is_an_object(page: str, source: str) -> None:
    assert all(isinstance(json.loads(line), dict) for line in source.splitlines())


@pytest.mark.parametrize(("page", "source"), told("yaml"))
def test_every_yaml_is_one_document_with_a_kind(page: str, source: str) -> None:
    document = yaml.safe_load(source)
    assert document["kind"] == "RayCluster"
    assert len(document["spec"]["workerGroupSpecs"]) == 1

"""The site: built strictly, no dead link, every name and setting in it, and read by a browser without a network."""

import html
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import repl_rl
from repl_rl.cli import main
from scripts.site.architecture import ROOT as PACKAGE
from scripts.site.architecture import arrows, plan
from scripts.site.links import Read, dead, external, pages
from scripts.site.pages import notebooks, origin, rewritten, sources
from scripts.site.settings import commands, settings
from tests.support.chromium import Tab, chromium
from tests.support.documents import ROOT, SITE, fenced

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search("^WARNING", done.stderr, re.MULTILINE), done.stderr  # the theme's notice names a variable
    return folder


@pytest.fixture(scope="module")
def read(site: Path) -> dict[Path, Read]:
    return pages(site)


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with chromium() as tab:
        yield tab


def test_every_text_is_a_page_and_nothing_else_is_but_what_is_made_of_code(read: dict[Path, Read], site: Path) -> None:
    shown = {origin(path.relative_to(site).with_suffix(".md").as_posix()) for path in read}
    texts = {name.replace("samplers/README.md", "samplers/index.md") for name in SITE}
    made = {name for name in shown - texts if not name.startswith("docs/reference/")}
    assert texts <= shown
    assert made == {"notebooks", *(f"notebooks/{path.name}" for path in ROOT.glob("notebooks/*.ipynb"))} | {
        origin(page) for page in sources(SITE)
    }
    assert "examples/minimal_grpo.py" in made


def test_no_link_and_no_anchor_is_dead(read: dict[Path, Read]) -> None:
    assert len(read) > 60
    assert dead(read) == []


def test_a_dead_link_and_a_dead_anchor_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">b</a><a href="b.html#gone">b</a><img src="c.png"><a id="x">'
    )
    (tmp_path / "b.html").write_text('<h1 id="here">b</h1><a href="a.html#x"></a><a href="https://example.org">e</a>')
    read = pages(tmp_path)
    assert dead(read) == [f"{tmp_path}/a.html: b.html#gone", f"{tmp_path}/a.html: c.png"]
    assert external(read) == ["https://example.org"]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.site.links", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.count("\ndead: ")) == (1, 2)


def test_every_public_name_is_in_the_reference_with_its_docstring(site: Path, read: dict[Path, Read]) -> None:
    names = {path: page for path, page in read.items() if path.is_relative_to(site / "reference" / "names")}
    anchored = set().union(*(page.anchors for page in names.values()))
    assert {f"repl_rl.{name}" for name in repl_rl.__all__} <= anchored
    texts = "".join(path.read_text() for path in names)
    bare = [
        name
        for name in repl_rl.__all__
        if not re.search(rf'id="repl_rl\.{name}".*?<div class="doc doc-contents[^>]*>.*?<p>', texts, re.DOTALL)
    ]
    assert bare == []


@pytest.mark.parametrize("command", commands())
def test_every_setting_of_the_help_is_in_the_reference_with_its_default(
    command: str, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, _, action = command.partition(" ")
    with pytest.raises(SystemExit):
        main([*command.split(), *(["NAME"] if verb == "sampler" else []), "--help-all"])
    told = set(re.findall(r"^(?:│ |  )--([\w.-]+)", capsys.readouterr().out, re.MULTILINE)) - {"help"}
    page = (site / "reference" / "settings" / f"{verb}.html").read_text()
    prefix = f"{action}-" if action else ""
    listed = [each for table in settings(commands()[command]).values() for each in table]
    assert {each.word[2:] for each in listed if each.word.startswith("--")} == told
    for each in listed:
        entry = page.partition(f'<dt id="{prefix}{each.word.removeprefix("--").lower()}">')[2].partition("</dd>")[0]
        assert html.escape(each.about) in entry
        assert each.about
        assert "must be given" in entry if each.default is None else f"<code>{html.escape(each.default)}" in entry


def test_every_code_block_of_the_site_is_one_that_tests_hold(site: Path, read: dict[Path, Read]) -> None:
    texts = [*SITE.values(), *notebooks().values(), *sources(SITE).values()]
    held = {_squeezed(source) for text in texts for _, source in fenced(text)}
    held |= {_squeezed(line) for text in texts for line in re.findall(r"(?m)(?:^ {4}.*\n)+", text)}
    unheld = [(path.name, code[:60]) for path in read for code in _shown(path.read_text()) if code not in held]
    assert unheld == []


def _shown(page: str) -> list[str]:
    """The code blocks of a built page, without numbers of lines; signatures are no blocks of code."""
    blocks = re.findall(r'<div class="(?![^"]*signature)[^"]*highlight">(.*?)</code>', page, re.DOTALL)
    numbers = r'<td class="linenos">.*?</td>'
    return [_squeezed(html.unescape(re.sub(rf"{numbers}|<[^>]+>", "", block, flags=re.DOTALL))) for block in blocks]


def _squeezed(code: str) -> str:
    return "".join(code.split())


def test_every_page_is_read_without_a_network_and_fits_a_phone(tab: Tab, read: dict[Path, Read]) -> None:
    wide = []
    for number, path in enumerate(read):
        tab.open(path.as_uri(), size=(390, 844), dark=bool(number % 2))
        if tab.run("document.documentElement.scrollWidth > innerWidth"):
            wide.append(path.name)
    assert wide == []
    assert tab.errors == []
    assert {address.partition(":")[0] for address in tab.requests} <= {"file", "data", "blob"}


def test_the_search_finds_a_setting_and_a_name_without_a_network(tab: Tab, site: Path) -> None:
    tab.open((site / "index.html").as_uri())
    for query, page in (("vLLM sleep", "settings/train.html"), ("TrajectoryPlayer", "names/runs.html")):
        tab.type("[data-md-component=search-query]", query)
        tab.press("End")  # the page looks when a key comes up
        tab.wait(f"[...document.querySelectorAll('.md-search-result__link')].some(a => a.href.includes('{page}'))")


def test_curves_that_are_drawn_on_white_are_turned_in_the_dark_and_nothing_else_is(tab: Tab, site: Path) -> None:
    credit = "benchmarks/results/credit"
    for page, picture, turned in (("index", "curves", True), ("index", "report", False), (credit, "credit", False)):
        for dark in (False, True):
            tab.open((site / f"{page}.html").as_uri(), dark=dark)
            style = tab.run(f"getComputedStyle(document.querySelector('img[src$=\"{picture}.png\"]')).filter")
            assert (style != "none") == (dark and turned), picture


def test_the_house_is_drawn_with_every_room_and_its_arrows_lead_to_all_imports(site: Path) -> None:
    page = (site / "design.html").read_text()
    drawing = page[page.index('<svg class="house"') : page.index("</svg>", page.index('<svg class="house"'))]
    assert set(re.findall(r"<text[^>]*>(\w+)</text>", drawing)) == set(plan())
    led = {name: set(others) for name, others in arrows(plan()).items()}
    assert drawing.count('class="arrow"') == sum(map(len, led.values()))
    for _ in plan():
        led = {name: others.union(*(led[other] for other in others)) for name, others in led.items()}
    assert all(others <= led[name] for name, others in plan().items())
    assert all((PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists() for name in plan())


def test_links_that_work_on_a_code_host_lead_to_pages() -> None:
    there = ["index.md", "howto.md", "samplers/README.md", "source/examples/minimal_grpo.py.md", "notebooks/index.md"]
    text = (
        "[a](../README.md) [b](samplers/README.md#x) [c](../examples/minimal_grpo.py) "
        "[d](../notebooks) [e](no.md) [f](#g)"
    )
    assert rewritten(text, "howto.md", there) == (
        "[a](index.md) [b](samplers/README.md#x) [c](source/examples/minimal_grpo.py.md) [d](notebooks/index.md) "
        "[e](no.md) [f](#g)"
    )
    assert rewritten("[a](docs/howto.md#b)", "index.md", there) == "[a](howto.md#b)"
    assert rewritten("[a](../../README.md)", "samplers/README.md", there) == "[a](../index.md)"

"""What MkDocs calls while it builds the site (`mkdocs.yml`): pages that stand outside docs/, links, and the house."""

from collections.abc import Mapping
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from scripts.site import architecture as house
from scripts.site import reference, settings
from scripts.site.pages import ROOT, WRITTEN, notebooks, rewritten, sources

HOUSE = "<!-- the site draws the house here -->"
"""Stands in docs/design.md where the drawing goes."""
_ASSETS = ("site.css", "iframe-worker.js")
"""Files of this folder that pages load."""
_LISTED = {"Public names": reference.FOLDER, "Settings": settings.FOLDER}
"""Sections of the navigation that name no pages in `mkdocs.yml`, and the folder whose pages they get."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose text is elsewhere in the repository, and those that are made of code."""
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for page, path in WRITTEN.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
        texts[path] = (ROOT / path).read_text(encoding="utf-8")
    for picture in ROOT.glob("benchmarks/results/**/*.png"):
        files.append(File.generated(config, picture.relative_to(ROOT).as_posix(), abs_src_path=str(picture)))
    made = {**notebooks(), **sources(texts), **reference.pages(), **settings.pages()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    for name in _ASSETS:
        files.append(File.generated(config, f"assets/{name}", abs_src_path=str(Path(__file__).with_name(name))))
    _list(config.nav, made)
    return files


def _list(nav: object, made: Mapping[str, str]) -> None:
    """Give each section of `_LISTED` its pages."""
    if isinstance(nav, list):
        for each in nav:
            _list(each, made)
    elif isinstance(nav, dict):
        for title, below in nav.items():
            if title in _LISTED:
                nav[title] = [page for page in made if page.startswith(f"{_LISTED[title]}/")]
            else:
                _list(below, made)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to pages, and draw the house where its page says so."""
    text = rewritten(markdown, page.file.src_uri, [file.src_uri for file in files])
    if HOUSE not in text:
        return text
    plan = house.plan()
    about = {room: reference.summary(room) for room in plan}
    pages = {room: f"{reference.FOLDER}/{room}.html" for room in reference.homes()}
    return text.replace(HOUSE, house.drawn(plan, about, pages))

"""The page at `/`: three files that ask the server that they come from, and nobody else."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from starlette.responses import Response

PAGES: Mapping[str, tuple[str, str]] = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
"""Address -> file, and its kind. They hold nothing that needs a key."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@cache
def _text(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def page(path: str) -> Response:
    """The file of an address of `PAGES`."""
    name, kind = PAGES[path]
    return Response(_text(name), media_type=kind, headers=_HEADERS)

"""Web page at `/`: three files that send requests to their own server only."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from starlette.responses import Response

PAGES: Mapping[str, tuple[str, str]] = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
"""Path -> file name and media type. The files hold nothing that needs an API key."""
# The page shows text of a language model, which is untrusted. The headers forbid inline scripts and other origins.
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
    """Return the response with the file of a path in `PAGES`."""
    name, kind = PAGES[path]
    return Response(_text(name), media_type=kind, headers=_HEADERS)

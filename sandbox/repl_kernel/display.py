"""Rich output: what objects say of themselves, and `IPython.display` without an IPython shell.

`get_ipython()` stays None: a library that asks is told the truth, and draws on no part of a shell that is not there.
"""

import secrets
from collections.abc import Callable, Iterable
from functools import cache
from typing import TypeAlias

import IPython.display
from IPython.core import display_functions
from IPython.core.formatters import DisplayFormatter

Bundle: TypeAlias = dict[str, object]
Publish = Callable[[str, Bundle], None]
"""Takes the type of a message and its content."""


@cache
def _formatter() -> DisplayFormatter:
    formatter = DisplayFormatter()
    formatter.formatters["text/plain"].pprint = False  # the console prints the `repr`
    formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", _figure)
    return formatter


def _figure(figure: object) -> object:
    from IPython.core.pylabtools import print_figure  # imports matplotlib's back ends

    return print_figure(figure, base64=True)


def bundle(
    value: object, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
) -> tuple[Bundle, Bundle]:
    """Data and metadata by MIME type. Both are empty if the object has displayed itself."""
    data, metadata = _formatter().format(value, include=include, exclude=exclude)
    return data, metadata


class Displays:
    """The functions of `IPython.display`, publishing through one kernel."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish

    def install(self) -> None:
        """Take the place of the functions that look for a shell."""
        for module in (IPython.display, display_functions):
            for name in ("display", "publish_display_data", "clear_output"):
                setattr(module, name, getattr(self, name))

    def publish_display_data(
        self,
        data: Bundle,
        metadata: Bundle | None = None,
        *,
        transient: Bundle | None = None,
        update: bool = False,
        **_: object,
    ) -> None:
        """Publish data by MIME type."""
        kind = "update_display_data" if update else "display_data"
        self._publish(kind, {"data": data, "metadata": metadata or {}, "transient": transient or {}})

    def clear_output(self, wait: bool = False) -> None:
        """Clear what the cell has shown so far; `wait`: as soon as there is something to take its place."""
        self._publish("clear_output", {"wait": wait})

    def display(
        self,
        *objs: object,
        include: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        metadata: Bundle | None = None,
        transient: Bundle | None = None,
        display_id: str | bool | None = None,
        raw: bool = False,
        clear: bool = False,
        update: bool = False,
        **_: object,
    ) -> display_functions.DisplayHandle | None:
        """Show objects in the client. With a `display_id` (True: a new one), returns a handle to update them by."""
        if update and not display_id:
            raise TypeError("display_id required for update_display")
        ident = secrets.token_hex(16) if display_id is True else display_id
        transient = dict(transient or {}) | ({"display_id": ident} if ident else {})
        if clear:
            self.clear_output(wait=True)
        for value in objs if objs or not ident else ("",):  # nothing yet: an empty place, to be filled later
            data, about = (value, {}) if raw and isinstance(value, dict) else bundle(value, include, exclude)
            if data:
                self.publish_display_data(data, about | (metadata or {}), transient=transient, update=update)
        return display_functions.DisplayHandle(ident) if ident else None

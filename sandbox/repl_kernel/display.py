"""Rich output: the representations of objects, and `IPython.display` without an IPython shell.

`get_ipython()` stays None, so that a library does not use parts of a shell that does not exist.
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
"""Function that takes the type of a message and its content."""


@cache
def _formatter() -> DisplayFormatter:
    formatter = DisplayFormatter()
    # The console prints the `repr`.
    formatter.formatters["text/plain"].pprint = False
    formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", _figure)
    return formatter


def _figure(figure: object) -> object:
    from IPython.core.pylabtools import print_figure  # imports matplotlib's back ends

    return print_figure(figure, base64=True)


def bundle(
    value: object, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
) -> tuple[Bundle, Bundle]:
    """Return data and metadata by MIME type. Both are empty if the object has displayed itself."""
    data, metadata = _formatter().format(value, include=include, exclude=exclude)
    return data, metadata


class Displays:
    """Functions of `IPython.display` that publish through one kernel."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish

    def install(self) -> None:
        """Replace the functions that require a shell."""
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
        """Clear the output of the cell. With `wait`, clear it when new output replaces it."""
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
        """Show objects in the client. With a `display_id` (True makes a new one), return a handle to update them."""
        if update and not display_id:
            raise TypeError("display_id required for update_display")
        ident = secrets.token_hex(16) if display_id is True else display_id
        transient = dict(transient or {}) | ({"display_id": ident} if ident else {})
        if clear:
            self.clear_output(wait=True)
        # A `display_id` without objects makes an empty place to be filled later.
        for value in objs if objs or not ident else ("",):
            data, about = (value, {}) if raw and isinstance(value, dict) else bundle(value, include, exclude)
            if data:
                self.publish_display_data(data, about | (metadata or {}), transient=transient, update=update)
        return display_functions.DisplayHandle(ident) if ident else None

"""Cells of an ordinary Jupyter client: the execution of a whole cell, and rich output.

As in the console, each expression statement echoes. Rich output consists of the representations of objects, and of
`IPython.display` without an IPython shell. `get_ipython()` stays None, so that a library does not use parts of a shell
that does not exist.
"""

import __future__

import ast
import os
import secrets
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import TypeAlias, cast

import ipykernel
import IPython.display
from IPython.core import display_functions
from IPython.core.formatters import DisplayFormatter

from repl_kernel.execute_line import ReplConsole

MimeBundle: TypeAlias = dict[str, object]
PublishMessage = Callable[[str, MimeBundle], None]
"""Function that takes the type of a message and its content."""
_FEATURES = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})
"""Flags of the compiler for all features of `__future__`."""
_FILE = "<stdin>"


@dataclass(frozen=True)
class CellError:
    """Early end of a cell, with the content of the messages `error` and `execute_reply`."""

    ename: str
    evalue: str
    traceback: list[str]
    """Lines of the traceback."""
    exit_requested: bool = False
    """True if `exit()` or `quit()` was called, which is no error."""


class CellConsole(ReplConsole):
    """Console that also runs cells of many statements. While a cell runs, an error is stored instead of printed."""

    hidden_file_prefixes = (os.path.dirname(__file__) + os.sep, os.path.dirname(ipykernel.__file__) + os.sep)
    _traceback_parts: list[str] | None = None

    def write(self, data: str) -> None:
        if self._traceback_parts is None:
            super().write(data)
        else:
            self._traceback_parts.append(data)

    def run_cell(self, source: str, display_result: Callable[[object], None]) -> CellError | None:
        """Run all statements, or none if one of them is not valid Python. `display_result` receives the value of a last
        expression.

        All other echoed values are printed.
        """
        self._traceback_parts = []
        self.cell_status = "ok"
        try:
            self._run_statements(self._compile_statements(source), display_result)
        except SystemExit as error:
            return CellError("SystemExit", _format_value(error), _format_last_line(error), _is_from_exit_builtin(error))
        except BaseException as error:
            # A user's own hook failed, or an interrupt came between two statements.
            return CellError(type(error).__name__, _format_value(error), _format_last_line(error))
        finally:
            traceback_parts, self._traceback_parts = self._traceback_parts, None
        if self.cell_status == "ok":
            return None
        value = getattr(sys, "last_value", None)
        return CellError(type(value).__name__, _format_value(value), "".join(traceback_parts).rstrip("\n").split("\n"))

    def _compile_statements(self, source: str) -> list[tuple[CodeType, bool]]:
        """Return compiled statements, each with True if it is a last expression. After a syntax error, return none."""
        compiler = self.compile.compiler
        # It passes the tree to `compile`.
        compile_one = cast("Callable[[ast.Interactive, str, str], CodeType]", compiler)
        try:
            flags = ast.PyCF_ONLY_AST | (compiler.flags & _FEATURES)
            tree = compile(source, _FILE, "exec", flags, True)
            codes = [compile_one(ast.Interactive([node]), _FILE, "single") for node in tree.body]
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
            self.showsyntaxerror(_FILE)
            return []
        ends_in_expression = bool(tree.body) and isinstance(tree.body[-1], ast.Expr)
        return [(code, ends_in_expression and number == len(codes)) for number, code in enumerate(codes, 1)]

    def _run_statements(
        self, statements: list[tuple[CodeType, bool]], display_result: Callable[[object], None]
    ) -> None:
        for code, is_value in statements:
            echo = sys.displayhook
            # A hook that the program itself has set stays active.
            is_displayed = is_value and echo is sys.__displayhook__
            if is_displayed:
                sys.displayhook = display_result
            try:
                self.runcode(code)
            finally:
                if is_displayed and sys.displayhook is display_result:
                    sys.displayhook = echo
            if self.cell_status != "ok":
                return


def _format_value(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return f"<unprintable {type(value).__name__} object>"


def _format_last_line(error: BaseException) -> list[str]:
    return "".join(traceback.format_exception_only(error)).rstrip("\n").split("\n")


def _is_from_exit_builtin(error: SystemExit) -> bool:
    """Return True if `exit()` or `quit()` raised it. These ask to leave, while `sys.exit()` ends a program."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_globals.get("__name__") == "_sitebuiltins"


# Rich output.


@cache
def _get_formatter() -> DisplayFormatter:
    formatter = DisplayFormatter()
    # The console prints the `repr`.
    formatter.formatters["text/plain"].pprint = False
    formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", _format_figure)
    return formatter


def _format_figure(figure: object) -> object:
    from IPython.core.pylabtools import print_figure  # imports matplotlib's back ends

    return print_figure(figure, base64=True)


def build_mime_bundle(
    value: object, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
) -> tuple[MimeBundle, MimeBundle]:
    """Return data and metadata by MIME type. Both are empty if the object has displayed itself."""
    data, metadata = _get_formatter().format(value, include=include, exclude=exclude)
    return data, metadata


class Displays:
    """Functions of `IPython.display` that publish through one kernel."""

    def __init__(self, publish: PublishMessage) -> None:
        self._publish = publish

    def install(self) -> None:
        """Replace the functions that require a shell."""
        for module in (IPython.display, display_functions):
            for name in ("display", "publish_display_data", "clear_output"):
                setattr(module, name, getattr(self, name))

    def publish_display_data(
        self,
        data: MimeBundle,
        metadata: MimeBundle | None = None,
        *,
        transient: MimeBundle | None = None,
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
        metadata: MimeBundle | None = None,
        transient: MimeBundle | None = None,
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
            data, about = (value, {}) if raw and isinstance(value, dict) else build_mime_bundle(value, include, exclude)
            if data:
                self.publish_display_data(data, about | (metadata or {}), transient=transient, update=update)
        return display_functions.DisplayHandle(ident) if ident else None

"""Execution of a whole cell of an ordinary Jupyter client. As in the console, each expression statement echoes."""

import __future__

import ast
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import cast

import ipykernel

from repl_kernel.console import Console

_FEATURES = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})
_FILE = "<stdin>"


@dataclass(frozen=True)
class Failure:
    """Early end of a cell, with the content of the messages `error` and `execute_reply`."""

    ename: str
    evalue: str
    traceback: list[str]
    """Lines of the traceback."""
    asked_to_leave: bool = False
    """True if `exit()` or `quit()` was called, which is no error."""


class CellConsole(Console):
    """Console that also runs cells of many statements. While a cell runs, an error is stored instead of printed."""

    own_files = (os.path.dirname(__file__) + os.sep, os.path.dirname(ipykernel.__file__) + os.sep)
    _kept: list[str] | None = None

    def write(self, data: str) -> None:
        if self._kept is None:
            super().write(data)
        else:
            self._kept.append(data)

    def run_cell(self, source: str, show: Callable[[object], None]) -> Failure | None:
        """Run all statements, or none if one of them is not valid Python. `show` receives the value of a last
        expression.

        All other echoed values are printed.
        """
        self._kept = []
        self.outcome = "ok"
        try:
            self._run_statements(self._statements(source), show)
        except SystemExit as error:
            return Failure("SystemExit", _text(error), _last_line(error), _from_the_exit_builtin(error))
        except BaseException as error:
            # A user's own hook failed, or an interrupt came between two statements.
            return Failure(type(error).__name__, _text(error), _last_line(error))
        finally:
            kept, self._kept = self._kept, None
        if self.outcome == "ok":
            return None
        value = getattr(sys, "last_value", None)
        return Failure(type(value).__name__, _text(value), "".join(kept).rstrip("\n").split("\n"))

    def _statements(self, source: str) -> list[tuple[CodeType, bool]]:
        """Return compiled statements, each with True if it is a last expression. After a syntax error, return none."""
        compiler = self.compile.compiler
        # It passes the tree to `compile`.
        one = cast("Callable[[ast.Interactive, str, str], CodeType]", compiler)
        try:
            flags = ast.PyCF_ONLY_AST | (compiler.flags & _FEATURES)
            tree = compile(source, _FILE, "exec", flags, True)
            codes = [one(ast.Interactive([node]), _FILE, "single") for node in tree.body]
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
            self.showsyntaxerror(_FILE)
            return []
        ends_in_value = bool(tree.body) and isinstance(tree.body[-1], ast.Expr)
        return [(code, ends_in_value and number == len(codes)) for number, code in enumerate(codes, 1)]

    def _run_statements(self, statements: list[tuple[CodeType, bool]], show: Callable[[object], None]) -> None:
        for code, is_value in statements:
            echo = sys.displayhook
            # A hook that the program itself has set stays active.
            shown = is_value and echo is sys.__displayhook__
            if shown:
                sys.displayhook = show
            try:
                self.runcode(code)
            finally:
                if shown and sys.displayhook is show:
                    sys.displayhook = echo
            if self.outcome != "ok":
                return


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return f"<unprintable {type(value).__name__} object>"


def _last_line(error: BaseException) -> list[str]:
    return "".join(traceback.format_exception_only(error)).rstrip("\n").split("\n")


def _from_the_exit_builtin(error: SystemExit) -> bool:
    """Return True if `exit()` or `quit()` raised it. These ask to leave, while `sys.exit()` ends a program."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_globals.get("__name__") == "_sitebuiltins"

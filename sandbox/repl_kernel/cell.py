"""A whole cell of an ordinary Jupyter client, run by the console's own rules: each expression statement echoes."""

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
    """Why a cell ended early: what the messages `error` and `execute_reply` say of it."""

    ename: str
    evalue: str
    traceback: list[str]
    """Its lines."""
    asked_to_leave: bool = False
    """`exit()` or `quit()` was called; this is no error."""


class CellConsole(Console):
    """The console, also for cells of many statements. While a cell runs, an error is kept instead of printed."""

    own_files = (os.path.dirname(__file__) + os.sep, os.path.dirname(ipykernel.__file__) + os.sep)
    _kept: list[str] | None = None

    def write(self, data: str) -> None:
        if self._kept is None:
            super().write(data)
        else:
            self._kept.append(data)

    def run_cell(self, source: str, show: Callable[[object], None]) -> Failure | None:
        """Run all statements, none if one of them is no Python. `show`: gets the value of a last expression.

        Whatever else echoes is printed.
        """
        self._kept = []
        self.outcome = "ok"
        try:
            self._run_statements(self._statements(source), show)
        except SystemExit as error:
            return Failure("SystemExit", _text(error), _last_line(error), _from_the_exit_builtin(error))
        except BaseException as error:  # a user's own hook failed, or an interrupt came between two statements
            return Failure(type(error).__name__, _text(error), _last_line(error))
        finally:
            kept, self._kept = self._kept, None
        if self.outcome == "ok":
            return None
        value = getattr(sys, "last_value", None)
        return Failure(type(value).__name__, _text(value), "".join(kept).rstrip("\n").split("\n"))

    def _statements(self, source: str) -> list[tuple[CodeType, bool]]:
        """Compiled statements, each with whether it is a last expression; empty after a syntax error."""
        compiler = self.compile.compiler
        one = cast("Callable[[ast.Interactive, str, str], CodeType]", compiler)  # it hands a tree on to `compile`
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
            shown = is_value and echo is sys.__displayhook__  # a hook of the program's own stays in charge
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
    """Whether `exit()` or `quit()` raised it: a wish to leave, where `sys.exit()` ends a program."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_globals.get("__name__") == "_sitebuiltins"

"""`code.InteractiveConsole` over a clean `__main__`. The only difference is that it records the result of each line."""

import builtins
import code
import contextlib
import os
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import BuiltinImporter

MAX_ANSWER_CHARS = 65_536


def create_main_module() -> types.ModuleType:
    """Return a new module `__main__`, as in a started interpreter. It replaces that of the running script."""
    module = types.ModuleType("__main__")
    initial_names: dict[str, object] = {"__annotations__": {}} if sys.version_info < (3, 14) else {}
    module.__dict__.update(__loader__=BuiltinImporter, **initial_names, __builtins__=builtins)
    sys.modules["__main__"] = module
    return module


class ReplConsole(code.InteractiveConsole):
    """Reference console. `cell_status` is the result of the last cell, and `final_answer` is the first final answer."""

    hidden_file_prefixes: tuple[str, ...] = (os.path.dirname(__file__) + os.sep,)
    """Prefixes of the paths of files whose frames no traceback shows."""

    def __init__(self, before_traceback: Callable[[], None] = lambda: None) -> None:
        """`before_traceback` is called before an exception is printed."""
        super().__init__(create_main_module().__dict__, "<stdin>")
        self.cell_status = "ok"
        self.final_answer: str | None = None
        self.on_traceback = before_traceback

    def showsyntaxerror(self, filename: str | None = None, **source: str) -> None:
        """Print a syntax error. Python 3.13 and later pass the cell as `source`, to find a line that the error
        lacks."""
        self.cell_status = "syntax_error"
        error = sys.exc_info()[1]
        if isinstance(error, SyntaxError) and error.lineno is None:
            # Python 3.13.0 fails if the error has no line number, as for a null byte.
            source = {}
        super().showsyntaxerror(filename, **source)

    def showtraceback(self) -> None:
        error_type = sys.exc_info()[0]
        self.cell_status = (
            "memory_limit" if error_type is not None and issubclass(error_type, MemoryError) else "exception"
        )
        self.on_traceback()
        _hide_own_frames(sys.exc_info()[1], self.hidden_file_prefixes)
        super().showtraceback()

    def print_last_traceback_line(self, error: BaseException) -> None:
        """Print the last line of a traceback, for an error that would have ended the reference console."""
        self.resetbuffer()
        self.cell_status = "exception"
        # A replaced sys.stderr may be what failed.
        with contextlib.suppress(Exception):
            self.write("".join(traceback.format_exception_only(error)))

    def install_submit_function(self) -> None:
        """Add `submit_final_answer` to the builtins, where `dir()` does not show it."""
        console = self

        def submit_final_answer(answer: object, *more: object) -> None:
            """Give the final answer of this task; its `str()` is graded. Only the first call counts.

            Several values are one answer, with ", " between them.
            """
            text = ", ".join(str.__str__(str(value)) for value in (answer, *more))
            if len(text) > MAX_ANSWER_CHARS:
                raise ValueError(f"the answer has {len(text)} characters; at most {MAX_ANSWER_CHARS} are allowed")
            if console.final_answer is None:
                console.final_answer = text

        submit_final_answer.__module__ = "builtins"
        submit_final_answer.__qualname__ = "submit_final_answer"
        vars(builtins)["submit_final_answer"] = submit_final_answer


def _hide_own_frames(error: BaseException | None, own_files: tuple[str, ...]) -> None:
    """Unlink frames of this package from a traceback, such as that of `submit_final_answer`."""
    entry = error.__traceback__ if error is not None else None
    while entry is not None:
        following = entry.tb_next
        while following is not None and following.tb_frame.f_code.co_filename.startswith(own_files):
            following = following.tb_next
        entry.tb_next = following
        entry = following


class _OnlyKernelThreads:
    """Filter of the warning that a fork is risky with threads (Python 3.12 and later), if all threads are the kernel's.

    Threads of its socket library count, too. Without this filter each `os.fork()` of a program prints the warning.
    """

    def __init__(self, own_threads: Collection[str]) -> None:
        self._own = {threading.main_thread().name, *own_threads}

    def match(self, message: str) -> bool:
        """Return True for the fork warning if only the kernel's threads run. `warnings` calls no other method."""
        return "is multi-threaded" in message and all(thread.name in self._own for thread in threading.enumerate())


def reset_interpreter(filters: Sequence[object], own_threads: Collection[str] = ()) -> None:
    """Undo the changes that the imports of a kernel make to the interpreter.

    Args:
        filters: `warnings.filters` before the imports.
        own_threads: names of the kernel's threads that run Python.
    """
    active_filters = warnings.filters
    assert isinstance(active_filters, list)
    # This also clears the cache of the filters, whose name differs between versions of Python.
    warnings.resetwarnings()
    active_filters[:] = filters
    if sys.version_info >= (3, 12):
        active_filters.insert(0, ("ignore", _OnlyKernelThreads(own_threads), DeprecationWarning, None, 0))
    sys.argv, sys.orig_argv = [""], ["python3"]
    sys.ps1, sys.ps2 = ">>> ", "... "
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)

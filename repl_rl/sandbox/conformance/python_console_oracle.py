"""Reference console: `code.InteractiveConsole.interact` of the Python that runs this script, with its own library only.

It reads `{"transcripts": [[line, ...], ...]}` from standard input. It prints, as JSON, the output of each line of each
transcript. Each transcript runs in its own forked process, in an empty folder. A transcript that ends its console gives
fewer texts than lines. A transcript on which the reference itself fails gives null. Python 3.13.0 fails on a null byte.
Earlier versions fail on an exception in `sys.excepthook`.
"""

import builtins
import code
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import types
from importlib.machinery import BuiltinImporter
from itertools import pairwise


class ScriptedConsole(code.InteractiveConsole):
    """Console that takes its lines from a list, and records the size of the output before each line."""

    def __init__(self, lines: list[str], output_fd: int, marks: int) -> None:
        main = types.ModuleType("__main__")
        # Before Python 3.14, the interpreter creates `__annotations__` in `__main__`, so do the same as in this
        # script's.
        begun: dict[str, object] = {"__annotations__": {}} if "__annotations__" in globals() else {}
        main.__dict__.update(__loader__=BuiltinImporter, **begun, __builtins__=builtins)
        sys.modules["__main__"] = main
        super().__init__(main.__dict__, "<stdin>")
        self.lines = iter(lines)
        self.output_fd = output_fd
        self.marks = marks

    def raw_input(self, prompt: str = "") -> str:
        self.record_mark()
        try:
            return next(self.lines)
        except StopIteration:
            os._exit(0)

    def record_mark(self) -> None:
        os.write(self.marks, b"%d\n" % os.fstat(self.output_fd).st_size)


def redirect_output(path: str) -> int:
    """Redirect standard output and error to one file, unbuffered, as in `python -u`. Standard input is empty."""
    output_fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        os.dup2(output_fd, number)
    return output_fd


def split_output_by_line(folder: str, lines: list[str]) -> list[str]:
    """Return the output per line of the transcript that ran in `folder`; fewer texts if a line ended the console."""
    with open(os.path.join(folder, "marks")) as file:
        marks = [int(mark) for mark in file]
    with open(os.path.join(folder, "output"), "rb") as file:
        data = file.read()
    # The console ended before it asked for another line.
    if len(marks) <= len(lines):
        marks.append(len(data))
    return [data[start:end].decode("utf-8", "replace") for start, end in pairwise(marks)]


if __name__ == "__main__":
    transcripts = json.load(sys.stdin)["transcripts"]
    texts = []
    sys.argv, sys.path[0] = [""], ""
    sys.stdout.flush()
    for lines in transcripts:
        folder = tempfile.mkdtemp()
        pid = os.fork()
        if pid == 0:
            fd = redirect_output(os.path.join(folder, "output"))
            marks = os.open(os.path.join(folder, "marks"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.mkdir(os.path.join(folder, "scratch"))
            os.chdir(os.path.join(folder, "scratch"))
            random.seed()
            # A transcript that does not end is killed after this time, seconds.
            signal.alarm(20)
            console = ScriptedConsole(lines, fd, marks)
            try:
                with contextlib.suppress(SystemExit):
                    console.interact(banner="", exitmsg="")
            except BaseException:
                open(os.path.join(folder, "failed"), "x").close()
            os._exit(0)
        os.waitpid(pid, 0)
        failed = os.path.exists(os.path.join(folder, "failed"))
        texts.append(None if failed else split_output_by_line(folder, lines))
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(texts))

"""The reference: `code.InteractiveConsole.interact` of the Python that runs this script, with its own library only.

Reads `{"transcripts": [[line, ...], ...]}` from standard input and prints, as JSON, for each transcript what each of
its lines printed. Each transcript runs in a forked process of its own, in an empty folder. A transcript that ends its
console gives fewer texts than lines. One on which the reference itself fails gives null: Python 3.13.0 does on a null
byte, and those before 3.13 on an exception in `sys.excepthook`.
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


class Scripted(code.InteractiveConsole):
    """Takes its lines from a list, and notes how much output there was when each line was asked for."""

    def __init__(self, lines: list[str], output_fd: int, marks: int) -> None:
        main = types.ModuleType("__main__")
        # As this script's own __main__ has it: the interpreter itself gives it one before Python 3.14.
        begun: dict[str, object] = {"__annotations__": {}} if "__annotations__" in globals() else {}
        main.__dict__.update(__loader__=BuiltinImporter, **begun, __builtins__=builtins)
        sys.modules["__main__"] = main
        super().__init__(main.__dict__, "<stdin>")
        self.lines = iter(lines)
        self.output_fd = output_fd
        self.marks = marks

    def raw_input(self, prompt: str = "") -> str:
        self.mark()
        try:
            return next(self.lines)
        except StopIteration:
            os._exit(0)

    def mark(self) -> None:
        os.write(self.marks, b"%d\n" % os.fstat(self.output_fd).st_size)


def redirect(path: str) -> int:
    """Standard output and error to one file, unbuffered, as `python -u` has them; no standard input."""
    output_fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        os.dup2(output_fd, number)
    return output_fd


def cut(folder: str, lines: list[str]) -> list[str]:
    """The output of each of `lines` in the transcript that ran in `folder`; fewer when one ended the console."""
    with open(os.path.join(folder, "marks")) as file:
        marks = [int(mark) for mark in file]
    with open(os.path.join(folder, "output"), "rb") as file:
        data = file.read()
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
            fd = redirect(os.path.join(folder, "output"))
            marks = os.open(os.path.join(folder, "marks"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.mkdir(os.path.join(folder, "scratch"))
            os.chdir(os.path.join(folder, "scratch"))
            random.seed()
            signal.alarm(20)
            console = Scripted(lines, fd, marks)
            try:
                with contextlib.suppress(SystemExit):
                    console.interact(banner="", exitmsg="")
            except BaseException:
                open(os.path.join(folder, "failed"), "x").close()
            os._exit(0)
        os.waitpid(pid, 0)
        failed = os.path.exists(os.path.join(folder, "failed"))
        texts.append(None if failed else cut(folder, lines))
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(texts))

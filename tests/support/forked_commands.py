"""Commands in forks of the test process, which has imported what they need.

Torch and TRL take five seconds to import on an idle core. A fork begins at once. It has its own arguments, environment,
working folder and standard streams. Tests of how a program begins start a new interpreter instead.
"""

import atexit
import gc
import io
import logging
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from repl_rl import cli
from repl_rl.cli import train_and_evaluate as _imported_before_the_fork  # noqa: F401


def run_command(
    *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, typed: str = "", timeout_s: float = 280
) -> subprocess.CompletedProcess[str]:
    """Run `repl-rl` with these words to its end."""
    return run_forked(cli.run, ("repl-rl", *words), cwd=cwd, env=env, typed=typed, timeout_s=timeout_s)


def run_forked(
    program: Callable[[], object],
    argv: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    typed: str = "",
    timeout_s: float = 280,
) -> subprocess.CompletedProcess[str]:
    """Run a function as the main program of a fork to its end.

    Args:
        program: what the process does; `SystemExit` has its exit code.
        argv: `sys.argv` of the process.
        cwd: its working folder; None means that of the tests.
        env: its environment; None means that of the tests.
        typed: what it reads from its standard input.
        timeout_s: seconds after which it is killed.
    """
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        stdin.write(typed.encode())
        stdin.seek(0)
        files = (stdin.fileno(), stdout.fileno(), stderr.fileno())
        if not (pid := os.fork()):
            _become(program, argv, cwd, os.environ if env is None else env, files)
        with os.fdopen(os.pidfd_open(pid)) as ended:
            if not select.select([ended], [], [], timeout_s)[0]:
                os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess(list(argv), code, *texts)


def _become(
    program: Callable[[], object],
    argv: Sequence[str],
    cwd: Path | None,
    env: Mapping[str, str],
    files: tuple[int, int, int],
) -> None:
    """Make this fork look like a new process, run the program, and exit."""
    code = 70
    try:
        gc.freeze()  # finalizers of what the tests have dropped are theirs to run
        atexit._clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in (signal.SIGALRM, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        environment = dict(env)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd or ".")
        for to, file in enumerate(files):
            os.dup2(file, to)
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8")
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(io.FileIO(2, "w", closefd=False)), encoding="utf-8", line_buffering=True
        )
        sys.argv = list(argv)
        tempfile.tempdir = None
        logging.root.handlers.clear()
        warnings.resetwarnings()
        for category in (DeprecationWarning, ImportWarning, PendingDeprecationWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        warnings.showwarning = _print_warning
        random.seed()
        torch.seed()
        code = _run(program)
    finally:
        os._exit(code)


def _run(program: Callable[[], object]) -> int:
    """Run the program and everything that a Python process does at its end. Returns the exit code."""
    try:
        program()
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _print_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: str | None = None,
) -> None:
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))

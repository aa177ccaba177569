"""The command line: parses, wires, exits."""

import atexit
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from repl_rl.cli.onward import welcome
from repl_rl.cli.processes import who
from repl_rl.cli.terminal import guard_streams
from repl_rl.errors import ConfigError, ReplRLError, RolloutFailure
from repl_rl.machine.cores import cores
from repl_rl.machine.launched import processes
from repl_rl.machine.refused import cause, remedy
from repl_rl.machine.stopping import STOPS, Terminated, explained, terminable
from repl_rl.machine.streams import settle_streams

VERBS = {
    "train": "train a policy with line rewards, and evaluate it before and after",
    "eval": "evaluate a policy on held-out tasks",
    "rollout": "print rollouts of a policy as console transcripts",
    "serve": "serve a policy to clients of OpenAI's API, its lines executed as in training",
    "chat": "ask a policy at the terminal, here or on a server, and watch its lines run",
    "view": "open the report of a run, or follow one that is running",
    "runs": "list the runs that there are, or lay two side by side",
    "replay": "step through a stored trajectory in a fresh console, verify it, branch from it",
    "export": "write trajectories as a table for other trainers, or read one back",
    "sampler": "check a sampler of your own against what every sampler must keep",
    "transcripts": "make demonstrations of doctests and of built-in tasks, executed and checked",
    "sft": "fine-tune a policy on demonstrations and on its own best rollouts, or begin a new one",
    "sandbox": "check a sandbox against its promises, or build the docker image",
    "fleet": "say what the nodes of a run do that plays on several",
    "kernel": "let Jupyter find the console: install its kernelspec",
    "bench": "measure our console, rollouts, update and credit beside the usual ways",
    "doctor": "say what works on this machine and what does not",
}
"""Each verb is a module of this package with a `main(argv) -> exit code`; it is imported only when it is called."""
_OUTLASTING = {"train", "sft", "transcripts", "serve"}
"""Verbs that go on where nobody reads what they print: what they make is elsewhere."""
_INTERRUPTED = 128 + signal.SIGINT
_STOPPED = {128 + number for number in (signal.SIGINT, *STOPS)}
_UNREAD = 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run `repl-rl`; alone it says what to do next.

    Returns the exit code: 0 done, 1 failed, 2 bad input, 3 where engine or consoles died again and again, 130
    interrupted, 143 after SIGTERM, 138 after SIGUSR1, 129 after SIGHUP, 141 where nobody reads what it prints and it
    makes nothing else.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _share_cores()
    logging.basicConfig(level=logging.WARNING, format="repl-rl: %(levelname)s: %(message)s")
    logging.getLogger("vllm").setLevel(logging.ERROR)  # TRL imports it before the engine says what it may log
    with terminable():
        try:
            return _run(arguments)
        except KeyboardInterrupt as stop:
            print(f"{who()}: interrupted", file=sys.stderr)
            return 128 + stop.number if isinstance(stop, Terminated) else _INTERRUPTED


def run() -> NoReturn:
    """The program: `main`, then the end of the process with its exit code.

    After a stop, and beside other processes, the interpreter is not taken apart: with vLLM's modules that takes seconds
    (11 s on two busy cores), and whoever stops a program gives it few.
    """
    settle_streams(outlast=bool(_OUTLASTING & {*sys.argv[1:2]}))
    guard_streams()
    stopped: list[int] = []
    atexit.register(_leave, stopped)  # registered before all others, so it runs after them
    # Programs of Python that libraries start, such as vLLM's, do not look for modules in the working folder either.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        code = main()
    except Exception:
        if processes() == 1:
            raise
        traceback.print_exc()
        code = 1
    if code in _STOPPED or processes() > 1:  # threads of a process group can wait for others that have ended, for ever
        stopped.append(code)
    sys.exit(code)


def _leave(stopped: Sequence[int]) -> None:
    for code in stopped:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(arguments: Sequence[str]) -> int:
    try:
        if not arguments:
            welcome()
            sys.stdout.flush()
            return 0
        if arguments[0] in ("-h", "--help"):
            print("usage: repl-rl VERB [options]    (repl-rl VERB --help lists them)\n")
            print("\n".join(f"  {verb:<12}{summary}" for verb, summary in VERBS.items()), flush=True)
            return 0
        if arguments[0] not in VERBS:
            raise ConfigError("verb", arguments[0], f"choose one of {', '.join(VERBS)}")
        try:
            code: int = importlib.import_module(f"repl_rl.cli.{arguments[0]}").main(arguments[1:])
        except SystemExit:  # after --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except ReplRLError as error:
        if (stop := explained(error)) is not error:
            raise stop from error
        print(f"{who()}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except RolloutFailure as failure:  # of a console that a person works in: no trajectory records it
        lost = " ".join(str(failure).split())
        print(f"{who()}: error: {lost}; `repl-rl doctor` says whether consoles work here", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read what we print has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _UNREAD
    except Exception as error:
        if (told := _refused(error)) is None:
            raise
        print(f"{who()}: error: {told}", file=sys.stderr)
        return 2
    return code


def _refused(error: Exception) -> str | None:
    """What is told of what the system refused; None: it is another error."""
    mending = remedy(cause(error))
    if isinstance(error, OSError) and error.filename is not None:
        return f"file is {error.filename!r}; {error.strerror}; {mending or 'give another path'}"
    return None if mending is None else f"{' '.join(str(error).split())}; {mending}"


def _share_cores() -> None:
    """Leave a core to the engine and the consoles, unless the environment says otherwise.

    OpenMP's threads spin at barriers: with as many threads as cores, an update waits for whichever thread a console
    has displaced (measured: 14 to 28 s instead of 1 s). Read by PyTorch when it is imported, hence set here.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() - 1)))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

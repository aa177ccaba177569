"""Command line interface: parse arguments, run a command, exit with its code."""

import atexit
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from repl_rl.cli.next_steps import print_welcome
from repl_rl.cli.terminal_output import get_error_prefix, guard_streams, make_streams_safe
from repl_rl.deprecations import REMOVED_IN
from repl_rl.errors import ConfigError, ReplRLError, RolloutFailure
from repl_rl.utils.describe_os_errors import find_errno, get_errno_remedy
from repl_rl.utils.hardware import count_cores
from repl_rl.utils.import_trl import skip_vllm_in_trl
from repl_rl.utils.processes import get_world_size
from repl_rl.utils.stop_signals import STOPS, Terminated, explain_error, handle_stop_signals

VERBS = {
    "train": "train a policy with line rewards, and evaluate it before and after",
    "eval": "evaluate a policy on held-out tasks",
    "rollout": "print rollouts of a policy as console transcripts",
    "serve": "serve a policy over OpenAI's API; its lines are executed as in training",
    "chat": "ask a policy at the terminal, here or on a server, and watch its lines run",
    "view": "open the report of a run, or follow one that is running",
    "runs": "list the runs, or compare two",
    "replay": "step through a stored trajectory in a fresh console, verify it, or branch from it",
    "export": "write trajectories as a table for other trainers, or read one back",
    "sampler": "check a sampler of your own against the sampler conformance suite",
    "transcripts": "make demonstrations from doctests and built-in tasks, executed and checked",
    "sft": "fine-tune a policy on demonstrations or on its own best rollouts, or create a new one",
    "sandbox": "check a sandbox against its promises, or build the docker image",
    "workers": "print the status of the rollout workers of a run",
    "kernel": "install the kernelspec, so that Jupyter finds the console",
    "bench": "run a benchmark of consoles, rollouts, updates or credit (needs a checkout)",
    "doctor": "check which engines and sandboxes work on this machine",
}
"""Commands with their help. A command is a module with `main(argv) -> exit code`, imported only when it is called."""
_OUTLASTING = {"train", "sft", "transcripts", "serve"}
"""Commands that continue without a reader of their output, because they write their results to files or clients."""
_INTERRUPTED = 128 + signal.SIGINT
_STOPPED = {128 + number for number in (signal.SIGINT, *STOPS)}
_UNREAD = 128 + signal.SIGPIPE

# vLLM logs while it is imported, before the engine sets its log level. Its processes import this module first, as part
# of their main program, so the level holds in them too.
logging.getLogger("vllm").setLevel(logging.ERROR)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `repl-rl` and return its exit code. Without arguments it suggests the next commands.

    Exit codes: 0 success, 1 failure, 2 bad input. The code is 3 if the engine or the consoles died repeatedly. It is
    130 if interrupted, 143 after SIGTERM, 138 after SIGUSR1 and 129 after SIGHUP. It is 141 if the reader of
    the output has gone and the command has no other result.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["fleet"]:
        print(f"repl-rl: `fleet` is `workers` now; the old name goes in {REMOVED_IN}", file=sys.stderr)
        arguments[0] = "workers"
    _limit_torch_threads()
    logging.basicConfig(level=logging.WARNING, format="repl-rl: %(levelname)s: %(message)s")
    with handle_stop_signals():
        try:
            return _run_verb(arguments)
        except KeyboardInterrupt as stop:
            print(f"{get_error_prefix()}: interrupted", file=sys.stderr)
            return 128 + stop.signal_number if isinstance(stop, Terminated) else _INTERRUPTED


def run() -> NoReturn:
    """Run the program: `main`, then exit the process with its code.

    After a stop signal, and in a run of several processes, the interpreter is not finalized. With vLLM's modules that
    takes seconds (11 s on two busy cores), and a program that is stopped has only a few.
    """
    make_streams_safe(outlast=bool(_OUTLASTING & {*sys.argv[1:2]}))
    guard_streams()
    stopped: list[int] = []
    # Exit handlers run in reverse order, so the first one registered runs last.
    atexit.register(_exit_process, stopped)
    # Python programs that libraries start, such as vLLM's, must not import from the working folder either.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    # Most verbs and engines do without vLLM, which takes seconds to import.
    skip_vllm_in_trl()
    try:
        code = main()
    except Exception:
        # Python reports the error of a single process. Several processes must still reach the exit below.
        if get_world_size() == 1:
            raise
        traceback.print_exc()
        code = 1
    # In a run of several processes, threads can wait forever for processes that have ended.
    if code in _STOPPED or get_world_size() > 1:
        stopped.append(code)
    sys.exit(code)


def _exit_process(stopped: Sequence[int]) -> None:
    """Exit at once with the code in `stopped`. An empty list lets the interpreter finalize."""
    for code in stopped:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_verb(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code. Errors that a user can fix are printed as one line."""
    try:
        if not arguments:
            print_welcome()
            sys.stdout.flush()
            return 0
        if arguments[0] in ("-h", "--help"):
            print("usage: repl-rl VERB [options]    (repl-rl VERB --help lists them)\n")
            print("\n".join(f"  {verb:<12}{summary}" for verb, summary in VERBS.items()), flush=True)
            return 0
        if arguments[0] not in VERBS:
            raise ConfigError("verb", arguments[0], f"choose one of {', '.join(VERBS)}")
        if sys.flags.optimize > 1:
            advice = "it removes docstrings, which transformers reads; unset PYTHONOPTIMIZE, and omit -OO"
            raise ConfigError("optimization level of Python", sys.flags.optimize, advice)
        _refuse_removed_folder()
        # Import the module of the command, and call it.
        try:
            code: int = importlib.import_module(f"repl_rl.cli.{arguments[0]}").main(arguments[1:])
        except SystemExit:
            # --help ends this way.
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except ReplRLError as error:
        # A signal to the process group may have ended the engine first. Then the signal is the reason.
        if (stop := explain_error(error)) is not error:
            raise stop from error
        print(f"{get_error_prefix()}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except RolloutFailure as failure:
        # The console of an interactive command failed, so no trajectory records the failure.
        lost = " ".join(str(failure).split())
        print(f"{get_error_prefix()}: error: {lost}; `repl-rl doctor` says whether consoles work here", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of the output has left, as `head` does. Redirect it, so that the flush at exit does not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _UNREAD
    except Exception as error:
        if (told := _format_os_error(error)) is None:
            raise
        print(f"{get_error_prefix()}: error: {told}", file=sys.stderr)
        return 2
    return code


def _format_os_error(error: Exception) -> str | None:
    """Return the message for an error of the operating system, or None for any other error."""
    mending = get_errno_remedy(find_errno(error))
    if isinstance(error, OSError) and error.filename is not None:
        return f"file is {error.filename!r}; {error.strerror}; {mending or 'give another path'}"
    return None if mending is None else f"{' '.join(str(error).split())}; {mending}"


def _refuse_removed_folder() -> None:
    """Raise ConfigError if the working folder does not exist any more."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("working folder", "removed", "change to a folder that exists") from None


def _limit_torch_threads() -> None:
    """Limit PyTorch to all cores but one, unless OMP_NUM_THREADS is set. One core stays free for other processes.

    OpenMP's threads spin at barriers. With one thread per core, an update waits for a thread that a console has
    preempted (measured: 14 to 28 s instead of 1 s). PyTorch reads the variables at import, so they are set here.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() - 1)))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

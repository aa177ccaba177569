"""What runs in a judge's limited process.

One request at a time over a socket, one reply each, both JSON. What a judge prints goes to standard error. The process
ends when the other side closes the socket, when a judge runs out of memory, or when its CPU time is over.
"""

import importlib
import json
import logging
import math
import re
import resource
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from multiprocessing.connection import Connection
from types import ModuleType
from typing import TypedDict

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.settings.named import imported
from repl_rl.tasks import Task

Inner = Callable[[Task, str], object]


class Texts(TypedDict):
    """What a judge may know of a task."""

    id: str
    question: str
    answer: str
    judge: str
    family: str
    fields: Mapping[str, object]
    """Of its row; what JSON does not hold comes as its text."""


class Request(TypedDict):
    """`task` None: import the judge and do nothing else."""

    judge: str
    task: Texts | None
    answer: str
    path: list[str]
    """`sys.path` of the asking process."""
    cpu_s: float


class Reply(TypedDict, total=False):
    """Exactly one of them."""

    value: float
    refused: tuple[str, str, str]
    """Thing, value and remedy of a `ConfigError`: the judge cannot be used, or the reference answer cannot be."""
    raised: str
    """The judge raised or returned nonsense: a sentence."""
    overran: str
    """It ran into a limit, and this process ends now: a sentence."""


def symbolic(task: Task, answer: str) -> float:
    """1.0 when math-verify finds both equal, each read as a whole as one formula, LaTeX or Python."""
    library = _math_verify()
    reference = library.parse(_formula(task.answer), parsing_timeout=None)
    if not reference:
        raise ConfigError(f"answer of task {task.id}", task.answer[:80], "the math judge needs a formula")
    try:
        value = library.parse(_formula(answer), parsing_timeout=None)
        return float(bool(value) and library.verify(reference, value, timeout_seconds=None))
    except MemoryError:
        raise
    except Exception:  # whatever the library makes of hostile text, the text is no right answer
        return 0.0


_PYTHON_SPELLINGS = ((r"\*\*", "^"), (r"\bpi\b", r"\\pi "), (r"\boo\b", r"\\infty "), (r"\*?\bI\b", "i"))


def _formula(text: str) -> str:
    """As LaTeX between dollar signs, so that nothing is picked out of the middle of a text."""
    text = text.strip().strip("$").strip()
    if "\\" not in text:
        for pattern, spelling in _PYTHON_SPELLINGS:
            text = re.sub(pattern, spelling, text)
    return f"${text}$"


def pattern(task: Task, answer: str) -> float:
    """1.0 when the whole answer, stripped, matches the regular expression that the task has as its answer."""
    try:
        compiled = re.compile(task.answer)
    except re.error as error:
        raise ConfigError(
            f"answer of task {task.id}", task.answer[:80], f"give a regular expression: {error}"
        ) from error
    return float(compiled.fullmatch(answer.strip()) is not None)


SHIPPED: Mapping[str, Inner] = {"math": symbolic, "regex": pattern}


@lru_cache(maxsize=64)
def load(name: str) -> Inner:
    """The judge of that name, imported.

    Raises:
        ConfigError: it cannot be imported, or is no function.
        UserCodeError: its module raised while it was imported.
    """
    if name in SHIPPED:
        if name == "math":
            _math_verify()
        return SHIPPED[name]
    found = imported("judge", name)
    if not callable(found):
        raise ConfigError("judge", name, "it is not a function")
    judge: Inner = found
    return judge


def _math_verify() -> ModuleType:
    # It takes a second and imports sympy: only a process that grades with it pays.
    try:
        return importlib.import_module("math_verify")
    except ImportError as error:
        remedy = f"it needs the package math-verify (pip install math-verify): {error}"
        raise ConfigError("judge", "math", remedy) from error


def answer_to(request: Request) -> Reply:
    """Grade one answer, or say what is wrong with the judge."""
    name, texts = request["judge"], request["task"]
    who = f"judge {name}: on task {texts['id'] if texts else None} it"
    try:
        judge = load(name)
        if texts is None:
            return Reply(value=0.0)
        value = judge(Task(**texts), request["answer"])
    except ConfigError as error:
        return Reply(refused=(error.thing, str(error.value), error.remedy))
    except MemoryError:
        return Reply(overran="it ran out of memory")
    except UserCodeError as error:
        return Reply(raised=str(error))
    except Exception as error:
        return Reply(raised=f"{who} raised {error!r}; mend it")
    if not isinstance(value, int | float) or not math.isfinite(value):
        return Reply(raised=f"{who} returned {value!r:.200}; return a finite number")
    return Reply(value=float(value))


def main(fd: int, memory_mb: int) -> None:
    """Serve the socket `fd` with at most `memory_mb` MiB of address space, until the other side hangs up."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.ERROR)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    with Connection(fd) as channel:
        while True:
            try:
                request: Request = json.loads(channel.recv_bytes())
            except EOFError:
                return
            sys.path[:] = request["path"]
            _allow_cpu(request["cpu_s"])
            reply = answer_to(request)
            channel.send_bytes(json.dumps(reply).encode())
            if "overran" in reply:
                return  # what is left after a failed allocation is not to be trusted


def _allow_cpu(seconds: float) -> None:
    """From now on, so much CPU time; SIGXCPU ends the process then, should nobody be left to kill it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))

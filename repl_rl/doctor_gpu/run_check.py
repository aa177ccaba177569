"""Process of one check of `doctor_gpu`: `python -m repl_rl.doctor_gpu.run_check FUNCTION DEVICE OPTIONS FOLDER`.

It starts the check after reading `GO` and the end of its standard input. It writes the verdict, the reason and the
figures to a JSON file in the folder. It is no part of `doctor_gpu`, whose exceptions would then be of two classes:
those of `__main__`, and those that checks import.
"""

import importlib
import json
import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from repl_rl.doctor_gpu import GO, CheckContext, Figures, NotRun, Verdict
from repl_rl.errors import SandboxUnavailable
from repl_rl.utils.atomic_files import write_text_atomically


def main(argv: Sequence[str]) -> None:
    """Run one check; the module docstring describes the arguments."""
    function, device, options, folder = argv
    logging.basicConfig(level=logging.WARNING)
    figures: Figures = {}
    try:
        # Import while earlier checks still run, then wait for the signal to start.
        module, _, name = function.partition(":")
        check = getattr(importlib.import_module(module), name)
        if sys.stdin.buffer.read() != GO:
            # The parent process has died.
            return
        figures = check(CheckContext(device, Path(folder) / "place"), **json.loads(options))
        verdict, reason = Verdict.PASSED, ""
    except (NotRun, SandboxUnavailable) as error:
        verdict, reason = Verdict.NOT_RUN, _format_line(error)
    # Any error is a result of the check.
    except Exception as error:
        traceback.print_exc()
        verdict, reason = Verdict.FAILED, f"{type(error).__name__}: {_format_line(error)}"
    result = {"verdict": verdict, "why": reason, "figures": figures}
    write_text_atomically(Path(folder) / "told.json", json.dumps(result))


def _format_line(error: Exception) -> str:
    return " ".join(str(error).split())[:600]


if __name__ == "__main__":
    main(sys.argv[1:])

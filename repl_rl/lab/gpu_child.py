"""One check of `gpu` in its own process: `python -m repl_rl.lab.gpu_child FUNCTION DEVICE OPTIONS FOLDER`.

Begins when it reads `GO`, all there is on its standard input. Writes `told.json` into the folder: the verdict, why, and
figures.
"""

import importlib
import json
import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from repl_rl.errors import SandboxUnavailable
from repl_rl.lab.gpu import GO, Figures, NotRun, Place, Verdict
from repl_rl.machine.files import write_whole


def main(argv: Sequence[str]) -> None:
    """See the top of this file."""
    function, device, options, folder = argv
    logging.basicConfig(level=logging.WARNING)
    figures: Figures = {}
    try:
        module, _, name = function.partition(":")
        check = getattr(importlib.import_module(module), name)
        if sys.stdin.buffer.read() != GO:
            return  # whoever has started this is gone
        figures = check(Place(device, Path(folder) / "place"), **json.loads(options))
        verdict, why = Verdict.PASSED, ""
    except (NotRun, SandboxUnavailable) as missing:
        verdict, why = Verdict.NOT_RUN, _line(missing)
    except Exception as error:  # whatever it is, it is what the check found
        traceback.print_exc()
        verdict, why = Verdict.FAILED, f"{type(error).__name__}: {_line(error)}"
    told = {"verdict": verdict, "why": why, "figures": figures}
    write_whole(Path(folder) / "told.json", json.dumps(told))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:600]


if __name__ == "__main__":
    main(sys.argv[1:])

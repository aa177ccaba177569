"""Finds modules of the user in the working folder, which an installed program does not look at.

The folder is not added to `sys.path`: libraries try to import dozens of optional modules, and a file of that name that
happens to lie there would run. Only modules that the user named are found there, and what those import themselves.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType


class WorkingFolderFinder(MetaPathFinder):
    """Comes last, so that installed packages win."""

    def __init__(self) -> None:
        self._named: dict[str, str] = {}
        """The folder in which each named module is looked for."""
        self._found: dict[str, str] = {}
        """The folder in which each module was found."""

    def name(self, module: str) -> None:
        """Look for that module in the working folder of now."""
        with suppress(FileNotFoundError):  # the working folder was removed
            self._named[module.partition(".")[0]] = os.getcwd()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`. A submodule is found by its package's path, not here."""
        if path is not None:
            return None
        folder = self._named.get(fullname) or self._found.get(_importer())
        spec = PathFinder.find_spec(fullname, [folder], target) if folder is not None else None
        if spec is not None and folder is not None:
            self._found[fullname] = folder
        return spec


def _importer() -> str:
    """The top-level name of the module that imports another one now; "": none does."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if top not in ("importlib", "_frozen_importlib", "_frozen_importlib_external"):
            return top
        frame = frame.f_back
    return ""


_FINDER = WorkingFolderFinder()


def look_here_for(module: str) -> None:
    """Let imports find `module` in the working folder, and there what it imports itself; installed packages win."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
    _FINDER.name(module)

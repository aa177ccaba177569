"""Import of user modules from the working folder, which an installed program does not search.

The folder is not added to `sys.path`: libraries try to import dozens of optional modules, and a file of such a name
in the folder would run. Only modules that the user named are found there, and modules that those import.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType


class WorkingFolderFinder(MetaPathFinder):
    """Module finder at the end of `sys.meta_path`, so that installed packages win."""

    def __init__(self) -> None:
        self._named: dict[str, str] = {}
        """Named module -> folder to search."""
        self._found: dict[str, str] = {}
        """Found module -> its folder."""

    def name(self, module: str) -> None:
        """Register a module to find in the current working folder."""
        # The working folder may have been removed.
        with suppress(FileNotFoundError):
            self._named[module.partition(".")[0]] = os.getcwd()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a top-level module. Submodules are found through the path of their package."""
        if path is not None:
            return None
        # A module that a found one imports is searched in the same folder.
        folder = self._named.get(fullname) or self._found.get(_importer())
        spec = PathFinder.find_spec(fullname, [folder], target) if folder is not None else None
        if spec is not None and folder is not None:
            self._found[fullname] = folder
        return spec


def _importer() -> str:
    """Return the top-level name of the module with the current import statement, or "" without one."""
    # Walk up the stack from the caller of `find_spec`, past the frames of the import system.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if top not in ("importlib", "_frozen_importlib", "_frozen_importlib_external"):
            return top
        frame = frame.f_back
    return ""


_FINDER = WorkingFolderFinder()


def look_here_for(module: str) -> None:
    """Let imports find `module`, and modules that it imports, in the working folder. Installed packages win."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
    _FINDER.name(module)

"""What of the host's files a `local` console sees: what programs look for, and this Python, each at its own path."""

import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from stat import S_ISDIR

from repl_rl.errors import SandboxUnavailable
from repl_rl.machine.assets import asset

PRIVATE = ("/tmp", "/dev/shm")
"""Covered by each console with an empty folder of its own."""
_OURS = (*map(Path, PRIVATE), Path("/dev"), Path("/proc"), Path("/run"))
"""Never the host's, nor a link inside, even where the host has one."""
_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store"),
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d"),
    *("/etc/fonts", "/var/cache/fontconfig", "/etc/mime.types", "/etc/magic", "/etc/terminfo"),
    *("/etc/ssl/certs", "/etc/ssl/cert.pem", "/etc/ssl/openssl.cnf", "/etc/crypto-policies"),
    *("/etc/pki/tls/certs", "/etc/pki/tls/cert.pem", "/etc/pki/tls/openssl.cnf", "/etc/pki/ca-trust/extracted"),
    *("/etc/locale.alias", "/etc/locale.conf", "/etc/default/locale", "/etc/protocols", "/etc/services"),
    *("/etc/os-release", "/etc/debian_version"),
)
"""Programs, and what their libraries look for: fonts, certificates (no key), locales. Nothing that names this host."""
_UTC = ("/etc/localtime", "/usr/share/zoneinfo/Etc/UTC")
"""A console's time zone is UTC wherever it runs; the other zones are below /usr."""
_KERNEL_NEEDS = ("ipykernel", "zmq")
_OWN = "repl_rl"
"""This package, which holds the generator of the built-in tasks with their answers."""
_MOST_LINKS = 40
_WIDE = ("/", "/home", "/media", "/mnt", "/opt", "/root", "/srv", "/var", "/var/tmp", *map(str, _OURS))
_PARTS = ("bin", "lib", "lib64", "etc", "share", "pyvenv.cfg")
"""What a virtual environment has. One that was made in a project's own folder has everything else beside it."""


@dataclass(frozen=True, slots=True)
class View:
    """How bubblewrap is told, and what the fork server has to know of it."""

    options: tuple[str, ...]
    """For bubblewrap, after its own /tmp, /dev, /proc and /run."""
    kept: tuple[str, ...]
    """Below `PRIVATE`: each console shows them again, after it has covered the folder that they are in."""
    packages: tuple[str, ...]
    """Folders of packages that Python may not find by itself there, for the end of `sys.path`."""


class _Draft:
    """A view that grows."""

    def __init__(self) -> None:
        self.options: list[str] = []
        self._folders = {Path("/"), *_OURS}
        self._links: set[Path] = set()
        self._trees: set[Path] = set()
        self._covered: set[Path] = set()

    def show(self, path: Path) -> Path:
        """Make `path` lead inside to where it leads here: every link on the way, then the file or folder itself.

        Returns where it leads.

        Raises:
            SandboxUnavailable: it leads to nothing.
        """
        rest, here = [*reversed(path.parts[1:])], Path("/")
        links = 0
        while rest:
            part = rest.pop()
            if part == "..":
                here = here.parent
                continue
            here /= part
            target = None if here in _OURS else _target(here)
            if target is None:
                continue
            links += 1
            if links > _MOST_LINKS:
                raise _lost(path, f"goes round in a circle at {here}")
            self._link(here, target)
            rest.extend(reversed([part for part in target.parts if part != "/"]))
            here = Path("/") if target.is_absolute() else here.parent
        if not here.exists():
            raise _lost(path, f"leads to {here}, which is not there")
        self._tree(here)
        return here

    def show_if_there(self, path: Path) -> None:
        """As `show`; nothing where it leads to nothing."""
        if path.exists():
            self.show(path)

    def covers(self, path: Path) -> bool:
        """Whether `path`, which has no link in it, is part of what is shown."""
        return not self._trees.isdisjoint((path, *path.parents))

    def place(self, source: Path, path: Path) -> None:
        """Show a file or folder of the package's own at `path`."""
        self.options += [*self._parents(path), "--ro-bind", str(source), str(path)]

    def cover(self, folder: Path) -> None:
        """Show an empty folder in place of one that would be seen."""
        real = folder.resolve()
        if real.is_dir() and self.covers(real) and real not in self._covered:
            self._covered.add(real)
            self.options += ["--tmpfs", str(real), "--remount-ro", str(real)]

    def link(self, path: Path, target: Path) -> None:
        """A link of the view's own."""
        self.options += [*self._parents(path), "--symlink", str(target), str(path)]

    @property
    def kept(self) -> tuple[str, ...]:
        """The topmost folders and links that were made below `PRIVATE`."""
        made = self._folders | self._links | self._trees
        return tuple(sorted(str(path) for path in made if str(path.parent) in PRIVATE and path not in _OURS))

    def _link(self, path: Path, target: Path) -> None:
        if path not in self._links and not self.covers(path):
            self.link(path, target)
            self._links.add(path)

    def _tree(self, path: Path) -> None:
        if path in self._folders & set(_OURS):
            raise _lost(path, "is a folder of which each console has its own")
        if not self.covers(path):
            self.place(path, path)
            self._trees.add(path)

    def _parents(self, path: Path) -> Iterator[str]:
        """Folders for everybody. bubblewrap alone would make them for their owner only."""
        for parent in reversed(path.parents):
            if parent not in self._folders and not self.covers(parent):
                self._folders.add(parent)
                yield from ("--perms", "0755", "--dir", str(parent))


def _target(path: Path) -> Path | None:
    try:
        return Path(os.readlink(path))
    except OSError:  # no link; what is not there at all, or not for this user, is told at the end
        return None


def _lost(path: Path, problem: str) -> SandboxUnavailable:
    remedy = f"mend it, or make a new environment with another Python than {sys.executable}"
    return SandboxUnavailable(f"sandbox 'local' needs {path}, which {problem}; {remedy}")


def view(inside: Path, preload: Sequence[str], *, own_uids: bool) -> View:
    """What a console of this Python sees.

    Args:
        inside: where the kernel's package is to be.
        preload: modules that must be found as well.
        own_uids: consoles have other users than this one, so what is shown must be readable by everybody.

    Raises:
        SandboxUnavailable: something that this Python needs is not there, or not readable; the message says which.
    """
    draft = _Draft()
    for name in _SYSTEM:
        draft.show_if_there(Path(name))
    for file in asset("sandbox/etc").iterdir():
        draft.place(file, Path("/etc", file.name))
    draft.link(*map(Path, _UTC))
    draft.place(asset("sandbox/repl_kernel"), inside)
    needed = [*_this_python(), *_package_folders()]
    shown = [draft.show(path) for path in needed]
    for path in (*_linked_packages(), *_modules((*_KERNEL_NEEDS, *preload)), *_libraries()):
        draft.show_if_there(path)
    for folder in _own_copies():
        draft.cover(folder)
    if own_uids:
        _refuse_unreadable([*shown, asset("sandbox/repl_kernel").resolve()])
    return View(tuple(draft.options), draft.kept, tuple(map(str, _package_folders())))


def _this_python() -> Iterator[Path]:
    """What its start reads: the interpreter, through all of its links, the environment, and the standard library."""
    if not sys.executable:
        raise SandboxUnavailable("sandbox 'local' needs sys.executable, which is empty; run repl_rl with python")
    for prefix in dict.fromkeys(map(Path, (sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix))):
        if (prefix / "pyvenv.cfg").exists():
            yield from (prefix / part for part in _PARTS if (prefix / part).exists())
        elif not _wide(prefix):
            yield prefix
    yield Path(sys.executable)
    yield Path(str(getattr(sys, "_base_executable", sys.executable)))  # by the path that the environment names
    yield from dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


def _wide(prefix: Path) -> bool:
    """Whether far more than a Python lies there: a Python that was installed into a home, or straight into /opt."""
    home = Path(os.path.expanduser("~"))
    return str(prefix) in _WIDE or prefix in (home, *home.parents)


def _package_folders() -> list[Path]:
    """The folders of installed packages on `sys.path`: not only an environment's own, but also those that it is given
    by a `.pth` file, by PYTHONPATH or by the user's own. A checkout is none: nothing of it is shown."""
    folders = [Path(name) for name in dict.fromkeys(sys.path) if os.path.isabs(name) and os.path.isdir(name)]
    return [folder for folder in folders if next(folder.glob("*.dist-info"), None) is not None]


def _own_copies() -> Iterator[Path]:
    """Each folder of this package that a console could import: the one that runs, and those of other installations."""
    yield Path(__file__).resolve().parent.parent
    for folder in (*_package_folders(), *_base_package_folders()):
        yield folder / _OWN


def _base_package_folders() -> Iterator[Path]:
    """Where the Python below an environment has packages of its own: they are shown, and found by their path."""
    for name in ("purelib", "platlib"):
        yield Path(sysconfig.get_path(name, vars={"base": sys.base_prefix, "platbase": sys.base_exec_prefix}))


def _linked_packages() -> Iterator[Path]:
    """Where packages really are that an installer has only linked: whole folders, or file by file."""
    for folder in _package_folders():
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_symlink():
                    yield Path(entry.path)
                elif entry.name.endswith(".dist-info") and os.path.islink(Path(entry.path, "METADATA")):
                    yield Path(entry.path, "METADATA").resolve().parent.parent


def _modules(names: Sequence[str]) -> Iterator[Path]:
    """The packages or files of modules, which an editable installation has outside of the environment."""
    for name in names:
        try:
            spec = find_spec(name.partition(".")[0])
        except ValueError:  # a module of this process that has no file
            continue
        if spec is not None:
            origin = [spec.origin] if spec.has_location and spec.origin else []
            yield from map(Path, spec.submodule_search_locations or origin)


def _libraries() -> Iterator[Path]:
    """The interpreter's own shared library, which may lie outside of its prefix."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        names = {line.rstrip("\n").split(maxsplit=5)[-1] for line in maps if "/libpython" in line}
    return map(Path, sorted(names))


def _refuse_unreadable(paths: Sequence[Path]) -> None:
    for path in paths:
        status = path.stat()
        wanted = 0o5 if S_ISDIR(status.st_mode) else 0o4
        if status.st_mode & wanted != wanted:
            raise SandboxUnavailable(
                f"sandbox 'local' gives each console a user of its own, who may not read {path} "
                f"(mode {status.st_mode & 0o777:o}); chmod -R go+rX '{path}'"
            )

"""Filesystem view of a `local` console: host files that programs need, and this Python, each at its own path."""

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
"""Folders that each console covers with its own empty folder."""
_OURS = (*map(Path, PRIVATE), Path("/dev"), Path("/proc"), Path("/run"))
"""Paths that never show the host's files, and are no links inside, even if they are links on the host."""
_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store"),
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d"),
    *("/etc/fonts", "/var/cache/fontconfig", "/etc/mime.types", "/etc/magic", "/etc/terminfo"),
    *("/etc/ssl/certs", "/etc/ssl/cert.pem", "/etc/ssl/openssl.cnf", "/etc/crypto-policies"),
    *("/etc/pki/tls/certs", "/etc/pki/tls/cert.pem", "/etc/pki/tls/openssl.cnf", "/etc/pki/ca-trust/extracted"),
    *("/etc/locale.alias", "/etc/locale.conf", "/etc/default/locale", "/etc/protocols", "/etc/services"),
    *("/etc/os-release", "/etc/debian_version"),
)
"""Programs, and files that their libraries need: fonts, certificates (no key), locales. None identifies this host."""
_UTC = ("/etc/localtime", "/usr/share/zoneinfo/Etc/UTC")
"""Link for the time zone. Every console uses UTC; the other zones are below /usr."""
_KERNEL_NEEDS = ("ipykernel", "zmq")
_OWN = "repl_rl"
"""Name of this package, which contains the generator of the built-in tasks with their answers."""
_MOST_LINKS = 40
_WIDE = ("/", "/home", "/media", "/mnt", "/opt", "/root", "/srv", "/var", "/var/tmp", *map(str, _OURS))
_PARTS = ("bin", "lib", "lib64", "etc", "share", "pyvenv.cfg")
"""Parts of a virtual environment. One that is a project's own folder contains other files, too."""


@dataclass(frozen=True, slots=True)
class View:
    """Filesystem view of a console."""

    options: tuple[str, ...]
    """Options of bubblewrap, after those for its own /tmp, /dev, /proc and /run."""
    kept: tuple[str, ...]
    """Paths below `PRIVATE` that each console shows again after it has covered their folder."""
    packages: tuple[str, ...]
    """Package folders that Python may not find inside by default, for the end of `sys.path`."""


class _Draft:
    """View under construction."""

    def __init__(self) -> None:
        self.options: list[str] = []
        self._folders = {Path("/"), *_OURS}
        self._links: set[Path] = set()
        self._trees: set[Path] = set()
        self._covered: set[Path] = set()

    def show(self, path: Path) -> Path:
        """Make `path` lead to the same file inside: add every link on the way, then the file or folder itself.

        Returns the path without links.

        Raises:
            SandboxUnavailable: it leads to nothing.
        """
        # Follow the path part by part, because each link on the way must exist inside.
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
            # Follow the target of the link before the remaining parts.
            rest.extend(reversed([part for part in target.parts if part != "/"]))
            here = Path("/") if target.is_absolute() else here.parent
        if not here.exists():
            raise _lost(path, f"leads to {here}, which is not there")
        self._tree(here)
        return here

    def show_if_there(self, path: Path) -> None:
        """As `show`, but ignore a path that leads to nothing."""
        if path.exists():
            self.show(path)

    def covers(self, path: Path) -> bool:
        """Return True if `path`, which contains no link, is part of the view."""
        return not self._trees.isdisjoint((path, *path.parents))

    def place(self, source: Path, path: Path) -> None:
        """Show the file or folder `source` at `path`, read-only."""
        self.options += [*self._parents(path), "--ro-bind", str(source), str(path)]

    def cover(self, folder: Path) -> None:
        """Show an empty folder in place of a visible one."""
        real = folder.resolve()
        if real.is_dir() and self.covers(real) and real not in self._covered:
            self._covered.add(real)
            self.options += ["--tmpfs", str(real), "--remount-ro", str(real)]

    def link(self, path: Path, target: Path) -> None:
        """Add a link to the view."""
        self.options += [*self._parents(path), "--symlink", str(target), str(path)]

    @property
    def kept(self) -> tuple[str, ...]:
        """Topmost folders and links that were added below `PRIVATE`."""
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
        """Yield options that make parent folders readable for every user. By default, bubblewrap makes them for the
        owner."""
        for parent in reversed(path.parents):
            if parent not in self._folders and not self.covers(parent):
                self._folders.add(parent)
                yield from ("--perms", "0755", "--dir", str(parent))


def _target(path: Path) -> Path | None:
    try:
        return Path(os.readlink(path))
    except OSError:
        # Not a link. A missing or unreadable path is reported at the end.
        return None


def _lost(path: Path, problem: str) -> SandboxUnavailable:
    remedy = f"repair it, or make a new environment with another Python than {sys.executable}"
    return SandboxUnavailable(f"sandbox 'local' needs {path}, which {problem}; {remedy}")


def view(inside: Path, preload: Sequence[str], *, own_uids: bool) -> View:
    """Return the view of a console that runs this Python.

    Args:
        inside: folder for the kernel's package.
        preload: modules that must be importable as well.
        own_uids: consoles have other users than this process, so every user must be able to read the shown files.

    Raises:
        SandboxUnavailable: something that this Python needs is missing or not readable; the message names it.
    """
    # Parts that are the same for every Python: programs, settings, the kernel's package.
    draft = _Draft()
    for name in _SYSTEM:
        draft.show_if_there(Path(name))
    for file in asset("sandbox/etc").iterdir():
        draft.place(file, Path("/etc", file.name))
    draft.link(*map(Path, _UTC))
    draft.place(asset("sandbox/repl_kernel"), inside)
    # This Python, its packages, and parts that an installer put elsewhere.
    needed = [*_this_python(), *_package_folders()]
    shown = [draft.show(path) for path in needed]
    for path in (*_linked_packages(), *_modules((*_KERNEL_NEEDS, *preload)), *_libraries()):
        draft.show_if_there(path)
    # Hide this package, which contains the answers of the built-in tasks.
    for folder in _own_copies():
        draft.cover(folder)
    if own_uids:
        _refuse_unreadable([*shown, asset("sandbox/repl_kernel").resolve()])
    return View(tuple(draft.options), draft.kept, tuple(map(str, _package_folders())))


def _this_python() -> Iterator[Path]:
    """Yield the paths that Python reads at its start: the interpreter, the environment and the standard library."""
    if not sys.executable:
        raise SandboxUnavailable("sandbox 'local' needs sys.executable, which is empty; run repl_rl with python")
    for prefix in dict.fromkeys(map(Path, (sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix))):
        if (prefix / "pyvenv.cfg").exists():
            yield from (prefix / part for part in _PARTS if (prefix / part).exists())
        elif not _wide(prefix):
            yield prefix
    yield Path(sys.executable)
    # The base interpreter, by the path that the environment names.
    yield Path(str(getattr(sys, "_base_executable", sys.executable)))
    yield from dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


def _wide(prefix: Path) -> bool:
    """Return True if the prefix contains far more than a Python, as a home folder or /opt does."""
    home = Path(os.path.expanduser("~"))
    return str(prefix) in _WIDE or prefix in (home, *home.parents)


def _package_folders() -> list[Path]:
    """Return the folders of installed packages on `sys.path`, from the environment, a `.pth` file, PYTHONPATH or the
    user. A source checkout is none, so nothing of it is shown."""
    folders = [Path(name) for name in dict.fromkeys(sys.path) if os.path.isabs(name) and os.path.isdir(name)]
    return [folder for folder in folders if next(folder.glob("*.dist-info"), None) is not None]


def _own_copies() -> Iterator[Path]:
    """Yield each folder of this package that a console could import: the running one, and other installations."""
    yield Path(__file__).resolve().parent.parent
    for folder in (*_package_folders(), *_base_package_folders()):
        yield folder / _OWN


def _base_package_folders() -> Iterator[Path]:
    """Yield the package folders of the base Python. They are part of the view, and can be imported by their path."""
    for name in ("purelib", "platlib"):
        yield Path(sysconfig.get_path(name, vars={"base": sys.base_prefix, "platbase": sys.base_exec_prefix}))


def _linked_packages() -> Iterator[Path]:
    """Yield the real paths of packages that an installer has linked, as whole folders or file by file."""
    for folder in _package_folders():
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_symlink():
                    yield Path(entry.path)
                elif entry.name.endswith(".dist-info") and os.path.islink(Path(entry.path, "METADATA")):
                    yield Path(entry.path, "METADATA").resolve().parent.parent


def _modules(names: Sequence[str]) -> Iterator[Path]:
    """Yield the packages or files of modules. In an editable installation they are outside of the environment."""
    for name in names:
        try:
            spec = find_spec(name.partition(".")[0])
        except ValueError:
            # The module exists in this process only and has no file.
            continue
        if spec is not None:
            origin = [spec.origin] if spec.has_location and spec.origin else []
            yield from map(Path, spec.submodule_search_locations or origin)


def _libraries() -> Iterator[Path]:
    """Return the interpreter's shared library, which may be outside of its prefix."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        names = {line.rstrip("\n").split(maxsplit=5)[-1] for line in maps if "/libpython" in line}
    return map(Path, sorted(names))


def _refuse_unreadable(paths: Sequence[Path]) -> None:
    for path in paths:
        status = path.stat()
        # A folder must also be searchable.
        wanted = 0o5 if S_ISDIR(status.st_mode) else 0o4
        if status.st_mode & wanted != wanted:
            raise SandboxUnavailable(
                f"sandbox 'local' gives each console a user of its own, who may not read {path} "
                f"(mode {status.st_mode & 0o777:o}); chmod -R go+rX '{path}'"
            )

"""bubblewrap for the `local` sandbox: remedies for its error messages, and the filesystem view of a console.

`find_remedy` also takes the messages of the fork server. `build_view` shows host files that programs need, and this
Python, each at its own path.
"""

import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from stat import S_ISDIR

from repl_rl.errors import SandboxUnavailable
from repl_rl.utils.package_data import find_asset

INSTEAD = "or use --sandbox docker, or --sandbox unsafe"
"""Other sandboxes, for the end of a remedy."""

# Remedies for error messages.

_SWITCHES = (
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
)
"""Settings below /proc/sys that forbid namespaces, the value that forbids them, and the command that allows them."""
_CAUSES = (
    # Pattern of a message, and its remedy. `{0}` is the pattern's first group.
    (r"No module named '(zmq|ipykernel|traitlets|tornado|jupyter_client)", "pip install ipykernel in this environment"),
    (
        r"error while loading shared libraries: (\S+):",
        "this Python finds {0} only through LD_LIBRARY_PATH, which is not set inside; take one that finds it by itself",
    ),
    (
        r"execvp (.+): No such file",
        "it or its loader is not where a console sees it: look at file '{0}', and take another Python",
    ),
    (r"execvp (.+): Permission denied", "chmod -R go+rX the folder of {0}, and see that it is not mounted noexec"),
    (
        r"[Cc]an't (?:find source path|bind mount|get type of source|mkdir(?: parents for)?|make symlink at) (.+): "
        r"(?:Permission|Read-only|No such|Not a)",
        "see that this user may read {0}",
    ),
    (r"[Nn]o space left", "make room on the disk, or in the memory, that it names"),
    (r"[Cc]annot allocate memory|Resource temporarily unavailable", "free memory or processes (ulimit -u)"),
)
_NAMESPACES = re.compile(
    r"[Nn]o permissions to creat|[Cc]reating new namespace|setting up [ug]id map|unshare|"
    r"[Oo]peration not permitted|prctl|[Ff]ailed to make / slave"
)


def find_remedy(message: str) -> str:
    """Return the remedy for the cause that the error message names, and the sandboxes to use instead."""
    if _NAMESPACES.search(message):
        return f"{_find_namespace_remedy()}, {INSTEAD}"
    for pattern, remedy in _CAUSES:
        if match := re.search(pattern, message):
            return f"{remedy.format(*match.groups())}, {INSTEAD}"
    return f"see what that says, {INSTEAD}"


def _find_namespace_remedy() -> str:
    for name, forbidden_value, command in _SWITCHES:
        try:
            value = Path("/proc/sys", name).read_text().strip()
        except OSError:
            # This kernel does not have the setting.
            continue
        if value == forbidden_value:
            return f"allow user namespaces ({command}, as root)"
    return (
        "this process may not make namespaces or filters: where it runs in a container, start that with "
        "--cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
    )


# Filesystem view of a console.

PRIVATE = ("/tmp", "/dev/shm")
"""Folders that each console covers with its own empty folder."""
_OURS = (*map(Path, PRIVATE), Path("/dev"), Path("/proc"), Path("/run"))
"""Paths that never show the host's files, and are not links inside, even if they are links on the host."""
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
_MAX_LINKS = 40
"""Maximum links on the way to one file. A longer way counts as a circle."""
_WIDE = ("/", "/home", "/media", "/mnt", "/opt", "/root", "/srv", "/var", "/var/tmp", *map(str, _OURS))
"""Prefixes that contain far more than a Python, so none of them is shown as a whole."""
_PARTS = ("bin", "lib", "lib64", "etc", "share", "pyvenv.cfg")
"""Parts of a virtual environment. One that is a project's own folder contains other files, too."""


@dataclass(frozen=True, slots=True)
class FilesystemView:
    """Filesystem view of a console."""

    bubblewrap_options: tuple[str, ...]
    """Options of bubblewrap, after those for its own /tmp, /dev, /proc and /run."""
    reexposed_paths: tuple[str, ...]
    """Paths below `PRIVATE` that each console shows again after it has covered their folder."""
    package_folders: tuple[str, ...]
    """Package folders that Python may not find inside by default, for the end of `sys.path`."""


class _ViewBuilder:
    """View under construction."""

    def __init__(self) -> None:
        self.options: list[str] = []
        self._folders = {Path("/"), *_OURS}
        self._links: set[Path] = set()
        self._trees: set[Path] = set()
        self._covered: set[Path] = set()

    def add_path(self, path: Path) -> Path:
        """Make `path` lead to the same file inside: add every link on the way, then the file or folder itself.

        Returns the path without links.

        Raises:
            SandboxUnavailable: it leads to nothing.
        """
        # Follow the path part by part, because each link on the way must exist inside.
        remaining, current = [*reversed(path.parts[1:])], Path("/")
        link_count = 0
        while remaining:
            part = remaining.pop()
            if part == "..":
                current = current.parent
                continue
            current /= part
            target = None if current in _OURS else _read_link_target(current)
            if target is None:
                continue
            link_count += 1
            if link_count > _MAX_LINKS:
                raise _make_missing_error(path, f"is a circle of links at {current}")
            self._add_link(current, target)
            # Follow the target of the link before the remaining parts.
            remaining.extend(reversed([part for part in target.parts if part != "/"]))
            current = Path("/") if target.is_absolute() else current.parent
        if not current.exists():
            raise _make_missing_error(path, f"leads to {current}, which does not exist")
        self._bind_tree(current)
        return current

    def add_path_if_exists(self, path: Path) -> None:
        """As `add_path`, but ignore a path that leads to nothing."""
        if path.exists():
            self.add_path(path)

    def is_covered(self, path: Path) -> bool:
        """Return True if `path`, which contains no link, is part of the view."""
        return not self._trees.isdisjoint((path, *path.parents))

    def bind_at(self, source: Path, path: Path) -> None:
        """Show the file or folder `source` at `path`, read-only."""
        self.options += [*self._iterate_parent_options(path), "--ro-bind", str(source), str(path)]

    def hide_folder(self, folder: Path) -> None:
        """Show an empty folder in place of a visible one."""
        real = folder.resolve()
        if real.is_dir() and self.is_covered(real) and real not in self._covered:
            self._covered.add(real)
            self.options += ["--tmpfs", str(real), "--remount-ro", str(real)]

    def add_link(self, path: Path, target: Path) -> None:
        """Add a link to the view."""
        self.options += [*self._iterate_parent_options(path), "--symlink", str(target), str(path)]

    @property
    def reexposed_paths(self) -> tuple[str, ...]:
        """Topmost folders and links that were added below `PRIVATE`."""
        added = self._folders | self._links | self._trees
        return tuple(sorted(str(path) for path in added if str(path.parent) in PRIVATE and path not in _OURS))

    def _add_link(self, path: Path, target: Path) -> None:
        if path not in self._links and not self.is_covered(path):
            self.add_link(path, target)
            self._links.add(path)

    def _bind_tree(self, path: Path) -> None:
        if path in self._folders & set(_OURS):
            raise _make_missing_error(path, "is a folder that each console replaces by a separate one")
        if not self.is_covered(path):
            self.bind_at(path, path)
            self._trees.add(path)

    def _iterate_parent_options(self, path: Path) -> Iterator[str]:
        """Yield options that make parent folders readable for every user. By default, bubblewrap makes them for the
        owner."""
        for parent in reversed(path.parents):
            if parent not in self._folders and not self.is_covered(parent):
                self._folders.add(parent)
                yield from ("--perms", "0755", "--dir", str(parent))


def _read_link_target(path: Path) -> Path | None:
    try:
        return Path(os.readlink(path))
    except OSError:
        # Not a link. A missing or unreadable path is reported at the end.
        return None


def _make_missing_error(path: Path, problem: str) -> SandboxUnavailable:
    remedy = f"repair it, or make a new environment with another Python than {sys.executable}"
    return SandboxUnavailable(f"sandbox 'local' needs {path}, which {problem}; {remedy}")


def build_view(kernel_folder: Path, preload: Sequence[str], *, own_uids: bool) -> FilesystemView:
    """Return the view of a console that runs this Python.

    Args:
        kernel_folder: folder for the kernel's package.
        preload: modules that must be importable as well.
        own_uids: consoles have other users than this process, so every user must be able to read the shown files.

    Raises:
        SandboxUnavailable: something that this Python needs is missing or not readable; the message names it.
    """
    # Parts that are the same for every Python: programs, settings, the kernel's package.
    builder = _ViewBuilder()
    for name in _SYSTEM:
        builder.add_path_if_exists(Path(name))
    for file in find_asset("sandbox/etc").iterdir():
        builder.bind_at(file, Path("/etc", file.name))
    builder.add_link(*map(Path, _UTC))
    builder.bind_at(find_asset("sandbox/repl_kernel"), kernel_folder)
    # This Python, its packages, and parts that an installer put elsewhere.
    required = [*_iterate_python_paths(), *_find_package_folders()]
    visible = [builder.add_path(path) for path in required]
    for path in (*_find_linked_packages(), *_find_module_paths((*_KERNEL_NEEDS, *preload)), *_find_python_libraries()):
        builder.add_path_if_exists(path)
    # Hide this package, which contains the answers of the built-in tasks.
    for folder in _find_own_copies():
        builder.hide_folder(folder)
    if own_uids:
        _check_readable([*visible, find_asset("sandbox/repl_kernel").resolve()])
    return FilesystemView(tuple(builder.options), builder.reexposed_paths, tuple(map(str, _find_package_folders())))


def _iterate_python_paths() -> Iterator[Path]:
    """Yield the paths that Python reads at its start: the interpreter, the environment and the standard library."""
    if not sys.executable:
        raise SandboxUnavailable("sandbox 'local' needs sys.executable, which is empty; run repl_rl with python")
    for prefix in dict.fromkeys(map(Path, (sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix))):
        if (prefix / "pyvenv.cfg").exists():
            yield from (prefix / part for part in _PARTS if (prefix / part).exists())
        elif not _is_wide_prefix(prefix):
            yield prefix
    yield Path(sys.executable)
    # The base interpreter, by the path that the environment names.
    yield Path(str(getattr(sys, "_base_executable", sys.executable)))
    yield from dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


def _is_wide_prefix(prefix: Path) -> bool:
    """Return True if the prefix contains far more than a Python, as a home folder or /opt does."""
    home = Path(os.path.expanduser("~"))
    return str(prefix) in _WIDE or prefix in (home, *home.parents)


def _find_package_folders() -> list[Path]:
    """Return the folders of installed packages on `sys.path`, from the environment, a `.pth` file, PYTHONPATH or the
    user. A source checkout is none, so nothing of it is shown."""
    folders = [Path(name) for name in dict.fromkeys(sys.path) if os.path.isabs(name) and os.path.isdir(name)]
    return [folder for folder in folders if next(folder.glob("*.dist-info"), None) is not None]


def _find_own_copies() -> Iterator[Path]:
    """Yield each folder of this package that a console could import: the running one, and other installations."""
    yield Path(__file__).resolve().parent.parent
    for folder in (*_find_package_folders(), *_find_base_package_folders()):
        yield folder / _OWN


def _find_base_package_folders() -> Iterator[Path]:
    """Yield the package folders of the base Python. They are part of the view, and can be imported by their path."""
    for name in ("purelib", "platlib"):
        yield Path(sysconfig.get_path(name, vars={"base": sys.base_prefix, "platbase": sys.base_exec_prefix}))


def _find_linked_packages() -> Iterator[Path]:
    """Yield the real paths of packages that an installer has linked, as whole folders or file by file."""
    for folder in _find_package_folders():
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_symlink():
                    yield Path(entry.path)
                elif entry.name.endswith(".dist-info") and os.path.islink(Path(entry.path, "METADATA")):
                    yield Path(entry.path, "METADATA").resolve().parent.parent


def _find_module_paths(names: Sequence[str]) -> Iterator[Path]:
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


def _find_python_libraries() -> Iterator[Path]:
    """Return the interpreter's shared library, which may be outside of its prefix."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        names = {line.rstrip("\n").split(maxsplit=5)[-1] for line in maps if "/libpython" in line}
    return map(Path, sorted(names))


def _check_readable(paths: Sequence[Path]) -> None:
    for path in paths:
        status = path.stat()
        # A folder must also be searchable.
        required_mode = 0o5 if S_ISDIR(status.st_mode) else 0o4
        if status.st_mode & required_mode != required_mode:
            raise SandboxUnavailable(
                f"sandbox 'local' runs each console as a different user, who may not read {path} "
                f"(mode {status.st_mode & 0o777:o}); chmod -R go+rX '{path}'"
            )

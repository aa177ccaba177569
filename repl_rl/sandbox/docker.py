"""The `docker` sandbox: a hardened container with a fork server, in which each console gets its own namespaces.

- the daemon: the used part of its package as protocols, the connection, a check of its hardening
- a running container
- the build of the image
- the options of a user, `Docker`, and the launcher of a container
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Annotated, ClassVar, Literal, Protocol, TypedDict, TypeVar

from repl_rl.errors import ConfigError, SandboxUnavailable
from repl_rl.sandbox.base import INODES, Limits, Sandbox, SandboxConfig, SandboxOptions
from repl_rl.sandbox.console_pool import open_fork_server_sandbox
from repl_rl.sandbox.isolated_subprocess import ENVIRONMENT, INSIDE
from repl_rl.settings.value_bounds import AtLeast, check_fields
from repl_rl.utils.hardware import count_cores
from repl_rl.utils.package_data import find_asset
from repl_rl.utils.processes import list_descendants

log = logging.getLogger(__name__)
_ResultT = TypeVar("_ResultT")

REMEDY = "or use --sandbox local, or --sandbox unsafe"
"""Other sandboxes, for the end of a remedy."""

# Constants of the image.

NAME = "repl-rl-sandbox"
"""Name that selects the package's own image in settings."""
BASE = "python:3.11-slim-bookworm"
"""Default image to build on."""
_BASE_PYTHON = "3.11"
"""Version of Python in `BASE`."""
_OTHER_BASES = re.compile(r"(python:3\.11[-.\w]*|repl-rl-base:latest)")
"""Images that replace `BASE` if the daemon has one of them but not `BASE`."""
_FILES = ("sandbox/Dockerfile", "sandbox/requirements.txt")
"""Files that the image is built from. Their contents determine its tag."""
_LOGGED_STEPS = re.compile(
    r"Step \d+/\d+ : |Pulling from |Pull complete|Collecting |Processing |Downloading |Installing "
)
"""Messages of a build that are logged, by their beginnings."""
_MAX_LOGGED_CHARS = 120
_UNREACHABLE = re.compile(r"registry|pull access denied|manifest|no such host|dial tcp|No such image", re.IGNORECASE)
"""Errors of a build that cannot fetch its base image."""

# Constants of a container.

OWNER = "repl_rl.owner"
"""Label of a container that holds the number of the process that started it."""
_USER = 64_000
"""User id in a container that root starts. A container that another user starts runs with that user's id."""
_HOST_FOLDER = "/run/host"
"""Folder in a container with the socket of this process."""
_PROCESSES = 2048
"""Maximum processes and threads of a container: those of 128 consoles, each of which is limited as well."""
_ACCEPT_TIMEOUT_S, _POLL_S = 60.0, 0.2
"""Time for a container to connect, and between two polls of its state, seconds."""
_REMOVE_TIMEOUT_S = 30
_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: process, user, group."""


def make_unavailable_error(problem: str, remedy: str) -> SandboxUnavailable:
    """Return the error for a sandbox that cannot be opened here."""
    return SandboxUnavailable(f"sandbox 'docker': {problem}; {remedy}, {REMEDY}")


# Daemon.


class ContainerState(TypedDict):
    """Used part of the container state in `docker inspect`."""

    Pid: int
    """Number of the first process, as the daemon sees it. 0 means that the container does not run."""


class Container(Protocol):
    """Used part of `docker.models.containers.Container`."""

    status: str
    attrs: Mapping[str, "ContainerState"]

    def start(self) -> None: ...
    def reload(self) -> None: ...
    def logs(self, *, tail: int) -> bytes: ...
    def remove(self, *, force: bool) -> None: ...
    def wait(self, *, condition: str, timeout: int) -> dict[str, object]: ...


class Image(Protocol):
    """Used part of `docker.models.images.Image`."""

    id: str
    tags: list[str]


class Images(Protocol):
    """Used part of `docker.models.images.ImageCollection`."""

    def get(self, name: str) -> Image: ...
    def pull(self, repository: str, tag: str | None = None) -> Image: ...
    def list(self) -> list[Image]: ...


class Containers(Protocol):
    """Used part of `docker.models.containers.ContainerCollection`."""

    def get(self, container_id: str) -> Container: ...
    def run(self, image: str, command: list[str], *, remove: bool, network_mode: str) -> bytes: ...


class Api(Protocol):
    """Used part of `docker.api.APIClient`."""

    def create_host_config(self, **settings: object) -> dict[str, object]: ...
    def create_container(self, image: str, command: list[str], **settings: object) -> dict[str, str]: ...
    def build(
        self, *, path: str, tag: str, buildargs: dict[str, str], rm: bool, forcerm: bool, decode: bool
    ) -> Generator[dict[str, object], None, None]: ...


class Daemon(Protocol):
    """Used part of `docker.DockerClient`."""

    api: Api
    containers: Containers
    images: Images

    def ping(self) -> bool: ...
    def info(self) -> dict[str, object]: ...


def connect_to_docker() -> Daemon:
    """Connect to the Docker daemon.

    Raises:
        SandboxUnavailable: no daemon answers, or this user has no permission.
    """
    import docker  # slow to import

    try:
        client: Daemon = docker.from_env()
        client.ping()
    except docker.errors.DockerException as error:
        if "Permission denied" in str(error):
            raise make_unavailable_error("no permission to talk to the daemon", "join the group 'docker'") from error
        raise make_unavailable_error("no daemon answers", "start it (systemctl start docker)") from error
    return client


def validate_hardening(info: Mapping[str, object]) -> None:
    """Reject a daemon that would start a container without some hardening options, with only a warning.

    `info`: report of `docker info`.

    Raises:
        SandboxUnavailable: no seccomp, or a limit that its cgroups do not enforce.
    """
    options = info.get("SecurityOptions")
    if not (isinstance(options, list) and any("name=seccomp" in str(option) for option in options)):
        raise make_unavailable_error("the daemon has no seccomp", "use a kernel with CONFIG_SECCOMP_FILTER")
    for name, limit in (("MemoryLimit", "memory"), ("PidsLimit", "processes"), ("CpuCfsQuota", "processors")):
        if not info.get(name):
            raise make_unavailable_error(f"the daemon's cgroups do not limit {limit}", "enable that cgroup controller")


# Running container.


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """Process that made a connection, as this process sees it."""

    pid: int
    """Process number. 0 means that its process namespace is not visible to this process."""
    uid: int
    pidfd: int
    """pidfd of the process. -1 means that it has ended."""

    @property
    def is_alive(self) -> bool:
        """False once the process has ended. Another process may then get its number."""
        return self.pidfd >= 0 and not select.select([self.pidfd], [], [], 0)[0]


@contextlib.contextmanager
def open_peer(connection: socket.socket) -> Iterator[PeerProcess]:
    """Identify the process that made a connection, and hold a handle on it within the context."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    try:
        handle = os.pidfd_open(pid) if pid > 0 else -1
    except ProcessLookupError:
        handle = -1
    try:
        yield PeerProcess(pid, uid, handle)
    finally:
        if handle >= 0:
            os.close(handle)


class RunningContainer:
    """Container of a fork server."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._log_tail = ""
        self._alive = True

    @property
    def is_alive(self) -> bool:
        """False once an inspection has found it ended."""
        return self._alive

    def poll(self) -> bool:
        """Fetch the state and the end of the log from the daemon. Return True if the container runs."""
        import docker  # slow to import

        try:
            self._log_tail = self._container.logs(tail=20).decode("utf-8", "replace").strip()
            self._container.reload()
            self._alive = self._container.status in ("created", "running")
        except (docker.errors.APIError, OSError):
            # The container was removed, or the daemon is away.
            self._alive = False
        return self._alive

    def owns_process(self, pid: int) -> bool:
        """Return True if `pid` is the container's first process or a descendant of it. This queries the daemon."""
        self.poll()
        first_pid = self._container.attrs["State"]["Pid"] if self._alive else 0
        return first_pid > 0 and pid in (first_pid, *list_descendants(first_pid))

    def get_log_tail(self) -> str:
        """Return the end of its log, as of the last `poll`."""
        return self._log_tail or "it printed nothing"

    async def stop(self) -> None:
        """Kill and remove the container."""
        await asyncio.to_thread(self._remove)
        self._alive = False

    def _remove(self) -> None:
        import docker  # slow to import

        try:
            self._container.remove(force=True)
        except docker.errors.NotFound:
            pass
        except docker.errors.APIError as error:
            if "already in progress" not in str(error):
                raise
            # Another removal is running; wait for its end.
            with contextlib.suppress(docker.errors.NotFound):
                self._container.wait(condition="removed", timeout=_REMOVE_TIMEOUT_S)
        except OSError:
            # The daemon is away. The connection to this process is closed, so the container ends and is removed without
            # us.
            pass


# Image.


def get_default_image() -> str:
    """Return the tag of the package's own image."""
    return make_image_name(*(find_asset(name).read_bytes() for name in _FILES))


def make_image_name(*contents: bytes) -> str:
    """Return the tag of an image that is built from these file contents. Other contents have another tag."""
    return f"{NAME}:{sha256(bytes(1).join(contents)).hexdigest()[:12]}"


async def build_if_missing() -> None:
    """Build the package's own image, and log each step. A cancelled build ends at its next message.

    Raises:
        SandboxUnavailable: the image cannot be built here; the message contains the command that helps.
    """
    stop = Event()
    build_task = asyncio.ensure_future(asyncio.to_thread(build_image, stop=stop))
    try:
        await asyncio.shield(build_task)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({build_task})
        raise


def build_image(*, base: str = "", wheels: Path | None = None, tag: str = "", stop: Event | None = None) -> str:
    """Build an image, and return its id.

    Args:
        base: image with Python 3.11 or later and pip to build on; empty means `BASE`, or a similar one that the daemon
            has.
        wheels: folder with the wheels of the requirements; None means that this machine's pip or the image's fetches
            them.
        tag: tag of the image; empty means that of `get_default_image`.
        stop: event that ends the build at its next message.

    Raises:
        ConfigError: `wheels` is not a folder with wheels.
        SandboxUnavailable: no daemon answers, or the build failed.
    """
    if wheels is not None and not list(wheels.glob("*.whl")):
        raise ConfigError(
            "wheels", str(wheels), "give a folder that holds the wheels of ipykernel and its requirements"
        )
    client, tag = connect_to_docker(), tag or get_default_image()
    base = base or _find_base_image(client)
    log.warning("building the image %s on %s; this happens once", tag, base)
    # The build context contains the Dockerfile, the requirements and their wheels.
    with tempfile.TemporaryDirectory() as folder:
        context = Path(folder)
        for name in _FILES:
            shutil.copy(find_asset(name), context)
        (context / "wheels").mkdir()
        if wheels is None:
            _download_wheels(context / "requirements.txt", context / "wheels", _read_python_version(client, base))
        else:
            for wheel in wheels.glob("*.whl"):
                shutil.copy(wheel, context / "wheels")
        return _run_build(client, context, tag, base, stop or Event())


def _find_base_image(client: Daemon) -> str:
    tags = [tag for image in client.images.list() for tag in image.tags]
    alternatives = sorted(tag for tag in tags if _OTHER_BASES.fullmatch(tag))
    return BASE if BASE in tags or not alternatives else alternatives[0]


def _read_python_version(client: Daemon, base: str) -> str:
    """Return the major and minor version of an image's Python. The image is pulled if the daemon lacks it.

    Raises:
        SandboxUnavailable: the image is not available, or has no Python of version 3.11 or later.
    """
    import docker  # slow to import

    # The version of the default base is known without starting a container.
    if base == BASE:
        return _BASE_PYTHON
    command = ["python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        try:
            client.images.get(base)
        except docker.errors.ImageNotFound:
            log.warning("pulling the image %s", base)
            client.images.pull(base)
        version = client.containers.run(base, command, remove=True, network_mode="none").decode().strip()
    except docker.errors.ContainerError as error:
        raise _make_build_error(base, f"its Python does not start: {error}") from error
    except docker.errors.APIError as error:
        raise _make_build_error(base, error.explanation or str(error)) from error
    if tuple(map(int, version.split("."))) < (3, 11):
        raise _make_build_error(base, f"its Python is {version}, and consoles need 3.11 or later")
    return version


def _download_wheels(requirements: Path, folder: Path, python: str) -> None:
    """Download the wheels with this machine's pip. Unlike a container's pip, it knows its index, proxies and
    certificates."""
    options = ("--quiet", "--disable-pip-version-check", "--only-binary=:all:", f"--python-version={python}")
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "-d", str(folder), "-r", str(requirements)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        log.warning("pip cannot fetch the image's wheels here (%s); the build uses the image's own pip", reason)
        # Without any wheel in the context, the Dockerfile uses the package index.
        for wheel in folder.iterdir():
            wheel.unlink()


def _run_build(client: Daemon, context: Path, tag: str, base: str, stop: Event) -> str:
    import docker  # slow to import

    line = "it printed nothing"
    try:
        # `forcerm` also removes the container of a step that fails.
        messages = client.api.build(
            path=str(context), tag=tag, buildargs={"BASE": base}, rm=True, forcerm=True, decode=True
        )
        with closing(messages):
            for line in _iterate_build_lines(messages):
                if _LOGGED_STEPS.match(line):
                    log.warning("%s", line[:_MAX_LOGGED_CHARS])
                if stop.is_set():
                    raise SandboxUnavailable("the build was cancelled")
        return client.images.get(tag).id
    except docker.errors.APIError as error:
        raise _make_build_error(base, error.explanation or str(error)) from error
    except docker.errors.BuildError as error:
        raise _make_build_error(base, f"{error.msg} ({line})") from error


def _iterate_build_lines(messages: "Iterator[dict[str, object]]") -> Iterator[str]:
    """Yield the daemon's build messages, line by line.

    Raises:
        docker.errors.BuildError: the daemon reports that the build failed.
    """
    import docker  # slow to import

    for message in messages:
        if "error" in message:
            raise docker.errors.BuildError(str(message["error"]), iter(()))
        for line in str(message.get("stream") or message.get("status") or "").splitlines():
            if line.strip():
                yield line.strip()


def _make_build_error(base: str, reason: str) -> SandboxUnavailable:
    problem = f"its image could not be built on {base}: {' '.join(reason.split())}"
    if not _UNREACHABLE.search(reason):
        return make_unavailable_error(
            problem, "repl-rl sandbox build --wheels FOLDER (of what pip download ipykernel fetches)"
        )
    # In a checkout, `scripts/docker` can make a base image without a registry.
    script = find_asset("sandbox").parent / "scripts" / "docker"
    if script.exists() and os.geteuid() == 0 and shutil.which("apt-get"):
        return make_unavailable_error(problem, f"'{script}' up makes a base without a registry")
    return make_unavailable_error(
        problem, "repl-rl sandbox build --base IMAGE (one that has pip and Python 3.11 or later)"
    )


# Options and launcher.


@dataclass(frozen=True, slots=True)
class Docker(SandboxConfig):
    """Options of the containers that consoles run in."""

    kind: ClassVar[str] = "docker"
    about: ClassVar[str] = "hardened containers"

    image: str = NAME
    """Image to start; the default one is built when it is missing."""
    runtime: str = ""
    """Container runtime, such as runsc; empty means the daemon's default."""
    isolation: Literal["session", "container"] = "session"
    """Separation of consoles: users and namespaces in one container, or one container per console."""
    memory_mb: Annotated[int, AtLeast(256)] = 8192
    """Memory of a container, without swap, MiB (>= 256)."""

    def __post_init__(self) -> None:
        check_fields(self, self.kind)

    @property
    def image_name(self) -> str:
        """Name of the image, as the daemon knows it."""
        return get_default_image() if self.image == NAME else self.image

    def open(self, options: SandboxOptions) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxConfig.open`."""
        one_per_console = self.isolation == "container"
        return open_fork_server_sandbox(
            self.kind, ContainerLauncher(options.limits, self, options.preload), options, server_each=one_per_console
        )

    def with_default_image(self) -> "Docker":
        """See `SandboxConfig.with_default_image`."""
        return replace(self, image=NAME, runtime="")

    def build_reference_command(self, script: Path) -> Sequence[str]:
        """See `SandboxConfig.build_reference_command`."""
        variables = [word for name, value in ENVIRONMENT.items() for word in ("-e", f"{name}={value}")]
        run = ["docker", "run", "--rm", "-i", "--network=none", "--tmpfs=/tmp", *variables]
        return [*run, "-v", f"{script}:/reference.py:ro", self.image_name, "python3", "-u", "/reference.py"]

    async def describe_status(self) -> str:
        """See `SandboxConfig.describe_status`. It queries the daemon and starts nothing."""
        return await asyncio.to_thread(_describe_daemon)


def _describe_daemon() -> str:
    client = connect_to_docker()
    validate_hardening(client.info())
    is_built = any(get_default_image() in image.tags for image in client.images.list())
    return f"its daemon answers; the image is {'there' if is_built else 'built at first use'}"


def _build_hardening_options(folder: str, limits: Limits, options: Docker) -> dict[str, object]:
    """Return all settings that harden the container. `docker inspect` shows each of them."""
    return {
        "network_mode": "none",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges", f"seccomp={find_asset('sandbox/seccomp.json').read_text()}"],
        "init": True,
        # If memory is out, the kernel kills processes of the container first.
        "oom_score_adj": 1000,
        "pids_limit": _PROCESSES,
        "nano_cpus": count_cores() * 10**9,
        "mem_limit": f"{options.memory_mb}m",
        # The limit of memory and swap together is the same, so no swap is left.
        "memswap_limit": f"{options.memory_mb}m",
        "tmpfs": {"/tmp": f"size={limits.disk_mb}m,nr_inodes={INODES},mode=1777,nosuid,nodev"},
        # Each console mounts its own /dev/shm.
        "shm_size": "1m",
        "binds": {
            folder: {"bind": _HOST_FOLDER, "mode": "ro"},
            str(find_asset("sandbox/repl_kernel")): {"bind": INSIDE, "mode": "ro"},
        },
        "auto_remove": True,
        "runtime": options.runtime or None,
    }


class _ImageMissing(Exception):
    """Error for an image that the daemon does not have."""


def _listen_for_container(listener: socket.socket, folder: Path) -> None:
    """Listen in `folder`. The container's user, who differs from this process's user, can connect there."""
    folder.mkdir()
    folder.chmod(0o755)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # The length of a socket address is limited, and the folder may have a long path.
        listener.bind(f"/proc/self/fd/{descriptor}/line")
    finally:
        os.close(descriptor)
    (folder / "line").chmod(0o777)
    listener.listen(1)
    listener.setblocking(False)


class PendingContainer(Protocol):
    """Container that has not connected yet."""

    def poll(self) -> bool: ...
    def owns_process(self, pid: int) -> bool: ...
    def get_log_tail(self) -> str: ...


async def accept_from_container(listener: socket.socket, container: PendingContainer) -> socket.socket:
    """Wait for the container's connection, and refuse that of any other process.

    Raises:
        SandboxUnavailable: the container ended, or did not connect in time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _ACCEPT_TIMEOUT_S
    # Use one task for all waits: a cancelled accept may already have accepted the connection, which would be lost.
    accept_task = asyncio.ensure_future(loop.sock_accept(listener))
    try:
        while loop.time() < deadline:
            await asyncio.wait({accept_task}, timeout=_POLL_S)
            if accept_task.done():
                connection = accept_task.result()[0]
                if await asyncio.to_thread(_is_from_container, connection, container):
                    return connection
                connection.close()
                accept_task = asyncio.ensure_future(loop.sock_accept(listener))
            elif not await asyncio.to_thread(container.poll):
                break
    finally:
        accept_task.cancel()
    raise make_unavailable_error(f"the container did not start: {container.get_log_tail()}", "rebuild the image")


def _is_from_container(connection: socket.socket, container: PendingContainer) -> bool:
    """Return True if a process of the container made the connection. Any other process is logged."""
    with open_peer(connection) as peer:
        if peer.pid > 0 and container.owns_process(peer.pid) and peer.is_alive:
            return True
    log.warning("refused: process %d of user %d connected in place of the container", peer.pid, peer.uid)
    return False


async def _run_uncancelled(blocking: Callable[[], _ResultT]) -> _ResultT:
    """Run `blocking` in a thread to its end. If this task is cancelled meanwhile, end the container that it started."""
    task = asyncio.ensure_future(asyncio.to_thread(blocking))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            result = await task
            if isinstance(result, RunningContainer):
                await result.stop()
        raise


@dataclass(frozen=True, slots=True)
class ContainerLauncher:
    """Launcher of a fork server in a container."""

    limits: Limits
    options: Docker
    preload: Sequence[str]
    isolates_consoles: bool = True
    uses_own_uids: bool = False
    find_remedy: Callable[[str], str] = lambda _: "repl-rl sandbox check --sandbox docker shows more; " + REMEDY

    async def start(self) -> tuple[socket.socket, RunningContainer]:
        """As `ForkServerLauncher.start`. It listens in a folder that the container sees, until the server connects.

        The folder is inside a folder of mode 0700. A bind mount bypasses that mode; other users of the machine cannot.
        """
        private_folder = tempfile.mkdtemp(prefix="repl-rl-")
        folder = os.path.join(private_folder, "host")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _listen_for_container(listener, Path(folder))
            container = await self._start_container(folder)
            try:
                return await accept_from_container(listener, container), container
            except BaseException:
                await container.stop()
                raise
        finally:
            listener.close()
            shutil.rmtree(private_folder, ignore_errors=True)

    async def _start_container(self, folder: str) -> RunningContainer:
        try:
            return await _run_uncancelled(lambda: self._run_container(folder))
        except _ImageMissing as error:
            if self.options.image != NAME:
                remedy = f"docker pull {self.options.image}, or leave --docker.image out"
                raise make_unavailable_error(f"there is no image {self.options.image!r}", remedy) from error
        # The package's own image is missing; build it and try again.
        await build_if_missing()
        return await _run_uncancelled(lambda: self._run_container(folder))

    def _run_container(self, folder: str) -> RunningContainer:
        import docker  # slow to import

        client = connect_to_docker()
        validate_hardening(client.info())
        server_options = json.dumps({"isolate": True, "preload": list(self.preload)})
        command = ["python3", f"{INSIDE}/fork_server_main.py", f"{_HOST_FOLDER}/line", server_options]
        user = os.geteuid() or _USER
        settings = client.api.create_host_config(**_build_hardening_options(folder, self.limits, self.options))
        # Remove the masks over /proc, so that a console can mount its own /proc. They restrict root, which is not used
        # here.
        settings.update(MaskedPaths=[], ReadonlyPaths=[])
        try:
            created = client.api.create_container(
                self.options.image_name,
                command,
                host_config=settings,
                user=f"{user}:{user}",
                environment=dict(ENVIRONMENT),
                working_dir="/",
                hostname="console",
                labels={OWNER: str(os.getpid())},
            )
            container = client.containers.get(created["Id"])
            container.start()
        except docker.errors.ImageNotFound as error:
            raise _ImageMissing from error
        except docker.errors.APIError as error:
            raise make_unavailable_error(
                f"the daemon refuses: {error.explanation}", "correct its configuration"
            ) from error
        except OSError as error:
            # The package raises a subclass of OSError if the daemon does not answer any more.
            raise make_unavailable_error(
                f"the daemon has gone away: {error}", "start it (systemctl start docker)"
            ) from error
        return RunningContainer(container)

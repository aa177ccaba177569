"""The `docker` sandbox: a hardened container with a fork server, in which each console gets its own namespaces."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Protocol, TypeVar

from repl_rl.machine.assets import asset
from repl_rl.machine.cores import cores
from repl_rl.sandbox.base import INODES, Births, Limits, Sandbox, SandboxKind
from repl_rl.sandbox.container import RunningContainer, open_peer
from repl_rl.sandbox.daemon import REMEDY, connect, refuse_weak, unavailable
from repl_rl.sandbox.image import NAME, build_missing, own_image
from repl_rl.sandbox.local import ENVIRONMENT, INSIDE
from repl_rl.sandbox.served import serve
from repl_rl.settings.bounds import AtLeast, check_fields

log = logging.getLogger(__name__)

OWNER = "repl_rl.owner"
"""Label of a container that holds the number of the process that started it."""
_USER = 64_000
_ACCEPT_TIMEOUT_S = 60.0
_POLL_S = 0.2
_HOST_FOLDER = "/run/host"
_PROCESSES = 2048
"""Maximum processes and threads of a container: those of 128 consoles, each of which is limited as well."""
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Docker(SandboxKind):
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
    def chosen_image(self) -> str:
        """Name of the image, as the daemon knows it."""
        return own_image() if self.image == NAME else self.image

    def open(self, births: Births) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxKind.open`."""
        each = self.isolation == "container"
        return serve(self.kind, ContainerLaunch(births.limits, self, births.preload), births, server_each=each)

    def with_usual_programs(self) -> "Docker":
        """See `SandboxKind.with_usual_programs`."""
        return replace(self, image=NAME, runtime="")

    def reference(self, script: Path) -> Sequence[str]:
        """See `SandboxKind.reference`."""
        variables = [word for name, value in ENVIRONMENT.items() for word in ("-e", f"{name}={value}")]
        run = ["docker", "run", "--rm", "-i", "--network=none", "--tmpfs=/tmp", *variables]
        return [*run, "-v", f"{script}:/reference.py:ro", self.chosen_image, "python3", "-u", "/reference.py"]

    async def doctor(self) -> str:
        """See `SandboxKind.doctor`. It queries the daemon and starts nothing."""
        return await asyncio.to_thread(_found_here)


def _found_here() -> str:
    client = connect()
    refuse_weak(client.info())
    built = any(own_image() in image.tags for image in client.images.list())
    return f"its daemon answers; the image is {'there' if built else 'built at first use'}"


def _hardening(folder: str, limits: Limits, options: Docker) -> dict[str, object]:
    """Return all settings that harden the container. `docker inspect` shows each of them."""
    return {
        "network_mode": "none",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges", f"seccomp={asset('sandbox/seccomp.json').read_text()}"],
        "init": True,
        # If memory is out, the kernel kills processes of the container first.
        "oom_score_adj": 1000,
        "pids_limit": _PROCESSES,
        "nano_cpus": cores() * 10**9,
        "mem_limit": f"{options.memory_mb}m",
        # The limit of memory and swap together is the same, so no swap is left.
        "memswap_limit": f"{options.memory_mb}m",
        "tmpfs": {"/tmp": f"size={limits.disk_mb}m,nr_inodes={INODES},mode=1777,nosuid,nodev"},
        # Each console mounts its own /dev/shm.
        "shm_size": "1m",
        "binds": {
            folder: {"bind": _HOST_FOLDER, "mode": "ro"},
            str(asset("sandbox/repl_kernel")): {"bind": INSIDE, "mode": "ro"},
        },
        "auto_remove": True,
        "runtime": options.runtime or None,
    }


class _ImageMissing(Exception):
    """Error for an image that the daemon does not have."""


def _listen(listener: socket.socket, folder: Path) -> None:
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


class Starting(Protocol):
    """Container that has not connected yet."""

    def look(self) -> bool: ...
    def owns(self, pid: int) -> bool: ...
    def last_words(self) -> str: ...


async def accept(listener: socket.socket, running: Starting) -> socket.socket:
    """Wait for the container's connection, and refuse that of any other process.

    Raises:
        SandboxUnavailable: the container ended, or did not connect in time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _ACCEPT_TIMEOUT_S
    # Use one task for all waits: a cancelled accept may already have accepted the connection, which would be lost.
    accepting = asyncio.ensure_future(loop.sock_accept(listener))
    try:
        while loop.time() < deadline:
            await asyncio.wait({accepting}, timeout=_POLL_S)
            if accepting.done():
                connection = accepting.result()[0]
                if await asyncio.to_thread(_is_of, connection, running):
                    return connection
                connection.close()
                accepting = asyncio.ensure_future(loop.sock_accept(listener))
            elif not await asyncio.to_thread(running.look):
                break
    finally:
        accepting.cancel()
    raise unavailable(f"the container did not start: {running.last_words()}", "rebuild the image")


def _is_of(connection: socket.socket, running: Starting) -> bool:
    """Return True if a process of the container made the connection. Any other process is logged."""
    with open_peer(connection) as peer:
        if peer.pid > 0 and running.owns(peer.pid) and peer.alive:
            return True
    log.warning("refused: process %d of user %d connected in place of the container", peer.pid, peer.uid)
    return False


async def _uncancelled(blocking: Callable[[], _Found]) -> _Found:
    """Run `blocking` in a thread to its end. If this task is cancelled meanwhile, end the container that it started."""
    work = asyncio.ensure_future(asyncio.to_thread(blocking))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            found = await work
            if isinstance(found, RunningContainer):
                await found.end()
        raise


@dataclass(frozen=True, slots=True)
class ContainerLaunch:
    """Launcher of a fork server in a container."""

    limits: Limits
    options: Docker
    preload: Sequence[str]
    isolated: bool = True
    own_uids: bool = False
    remedy_for: Callable[[str], str] = lambda _: "repl-rl sandbox check --sandbox docker tells more; " + REMEDY

    async def start(self) -> tuple[socket.socket, RunningContainer]:
        """As `Launch.start`. It listens in a folder that the container sees, until the fork server has connected.

        The folder is inside a folder of mode 0700. A bind mount bypasses that mode; other users of the machine cannot.
        """
        private = tempfile.mkdtemp(prefix="repl-rl-")
        folder = os.path.join(private, "host")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _listen(listener, Path(folder))
            running = await self._start(folder)
            try:
                return await accept(listener, running), running
            except BaseException:
                await running.end()
                raise
        finally:
            listener.close()
            shutil.rmtree(private, ignore_errors=True)

    async def _start(self, folder: str) -> RunningContainer:
        try:
            return await _uncancelled(lambda: self._run(folder))
        except _ImageMissing as missing:
            if self.options.image != NAME:
                remedy = f"docker pull {self.options.image}, or leave --docker.image out"
                raise unavailable(f"there is no image {self.options.image!r}", remedy) from missing
        # The package's own image is missing; build it and try again.
        await build_missing()
        return await _uncancelled(lambda: self._run(folder))

    def _run(self, folder: str) -> RunningContainer:
        import docker  # slow to import

        client = connect()
        refuse_weak(client.info())
        zygote = json.dumps({"isolate": True, "preload": list(self.preload)})
        command = ["python3", f"{INSIDE}/zygote.py", f"{_HOST_FOLDER}/line", zygote]
        user = os.geteuid() or _USER
        settings = client.api.create_host_config(**_hardening(folder, self.limits, self.options))
        # Remove the masks over /proc, so that a console can mount its own /proc. They restrict root, which is not used
        # here.
        settings.update(MaskedPaths=[], ReadonlyPaths=[])
        try:
            created = client.api.create_container(
                self.options.chosen_image,
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
            raise unavailable(f"the daemon refuses: {error.explanation}", "correct its configuration") from error
        except OSError as error:
            # The package raises a subclass of OSError if the daemon does not answer any more.
            raise unavailable(f"the daemon has gone away: {error}", "start it (systemctl start docker)") from error
        return RunningContainer(container)

"""The image of the `docker` sandbox: what it is called, and how it is built."""

import asyncio
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from threading import Event

from repl_rl.errors import ConfigError, SandboxUnavailable
from repl_rl.machine.assets import asset
from repl_rl.sandbox.daemon import Daemon, connect, unavailable

NAME = "repl-rl-sandbox"
"""What stands for the package's own image where an image can be chosen."""
BASE = "python:3.11-slim-bookworm"
_BASE_PYTHON = "3.11"
_OTHER_BASES = re.compile(r"(python:3\.11[-.\w]*|repl-rl-base:latest)")
"""Images that do as well, where the daemon has one and not `BASE`."""
_FILES = ("sandbox/Dockerfile", "sandbox/requirements.txt")
_TOLD = re.compile(r"Step \d+/\d+ : |Pulling from |Pull complete|Collecting |Processing |Downloading |Installing ")
_LONGEST = 120
_UNREACHABLE = re.compile(r"registry|pull access denied|manifest|no such host|dial tcp|No such image", re.IGNORECASE)

_log = logging.getLogger(__name__)


def own_image() -> str:
    """The package's own image."""
    return named(*(asset(name).read_bytes() for name in _FILES))


def named(*contents: bytes) -> str:
    """What an image of these files is called: an image of other files is never taken for it."""
    return f"{NAME}:{sha256(bytes(1).join(contents)).hexdigest()[:12]}"


async def build_missing() -> None:
    """Build the package's own image; says so in the log, step by step. A cancelled build ends at its next message.

    Raises:
        SandboxUnavailable: it cannot be built here; the message has the command that helps.
    """
    stop = Event()
    work = asyncio.ensure_future(asyncio.to_thread(build, stop=stop))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({work})
        raise


def build(*, base: str = "", wheels: Path | None = None, tag: str = "", stop: Event | None = None) -> str:
    """Build an image, and return its id.

    Args:
        base: image with Python 3.11 or later and pip to build on; "": `BASE`, or one like it that the daemon has.
        wheels: folder with the wheels of what the image needs; None: this machine's pip fetches them, or the image's.
        tag: what to call it; "": as `own_image` says.
        stop: give up at the next message once this is set.

    Raises:
        ConfigError: `wheels` is no folder with wheels.
        SandboxUnavailable: no daemon, or the build failed.
    """
    if wheels is not None and not list(wheels.glob("*.whl")):
        raise ConfigError(
            "wheels", str(wheels), "give a folder that holds the wheels of ipykernel and its requirements"
        )
    client, tag = connect(), tag or own_image()
    base = base or _base(client)
    _log.warning("building the image %s on %s; this happens once", tag, base)
    with tempfile.TemporaryDirectory() as folder:
        context = Path(folder)
        for name in _FILES:
            shutil.copy(asset(name), context)
        (context / "wheels").mkdir()
        if wheels is None:
            _download(context / "requirements.txt", context / "wheels", _python_of(client, base))
        else:
            for wheel in wheels.glob("*.whl"):
                shutil.copy(wheel, context / "wheels")
        return _run(client, context, tag, base, stop or Event())


def _base(client: Daemon) -> str:
    tags = [tag for image in client.images.list() for tag in image.tags]
    others = sorted(tag for tag in tags if _OTHER_BASES.fullmatch(tag))
    return BASE if BASE in tags or not others else others[0]


def _python_of(client: Daemon, base: str) -> str:
    """Major and minor version of the Python of an image, which is pulled where the daemon lacks it.

    Raises:
        SandboxUnavailable: the image cannot be had, or has no Python from 3.11 on.
    """
    import docker  # slow to import

    if base == BASE:
        return _BASE_PYTHON
    ask = ["python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        try:
            client.images.get(base)
        except docker.errors.ImageNotFound:
            _log.warning("pulling the image %s", base)
            client.images.pull(base)
        version = client.containers.run(base, ask, remove=True, network_mode="none").decode().strip()
    except docker.errors.ContainerError as error:
        raise _failed(base, f"its Python does not start: {error}") from error
    except docker.errors.APIError as error:
        raise _failed(base, error.explanation or str(error)) from error
    if tuple(map(int, version.split("."))) < (3, 11):
        raise _failed(base, f"its Python is {version}, and consoles need 3.11 or later")
    return version


def _download(requirements: Path, folder: Path, python: str) -> None:
    """With this machine's pip, which knows its index, proxies and certificates; a container's does not."""
    options = ("--quiet", "--disable-pip-version-check", "--only-binary=:all:", f"--python-version={python}")
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "-d", str(folder), "-r", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        _log.warning("pip cannot fetch the image's wheels here (%s): the image's own pip is to", reason)
        for wheel in folder.iterdir():
            wheel.unlink()


def _run(client: Daemon, context: Path, tag: str, base: str, stop: Event) -> str:
    import docker  # slow to import

    said = "it said nothing"
    try:
        # forcerm: without it, a step that fails leaves its container behind
        messages = client.api.build(
            path=str(context), tag=tag, buildargs={"BASE": base}, rm=True, forcerm=True, decode=True
        )
        with closing(messages):
            for said in _words(messages):
                if _TOLD.match(said):
                    _log.warning("%s", said[:_LONGEST])
                if stop.is_set():
                    raise SandboxUnavailable("the build was given up")
        return client.images.get(tag).id
    except docker.errors.APIError as error:
        raise _failed(base, error.explanation or str(error)) from error
    except docker.errors.BuildError as error:
        raise _failed(base, f"{error.msg} ({said})") from error


def _words(messages: "Iterator[dict[str, object]]") -> Iterator[str]:
    """What the daemon says of a build, line by line.

    Raises:
        docker.errors.BuildError: it says that the build failed.
    """
    import docker  # slow to import

    for message in messages:
        if "error" in message:
            raise docker.errors.BuildError(str(message["error"]), iter(()))
        for line in str(message.get("stream") or message.get("status") or "").splitlines():
            if line.strip():
                yield line.strip()


def _failed(base: str, reason: str) -> SandboxUnavailable:
    problem = f"its image could not be built on {base}: {' '.join(reason.split())}"
    if not _UNREACHABLE.search(reason):
        return unavailable(problem, "repl-rl sandbox build --wheels FOLDER (of what pip download ipykernel fetches)")
    script = asset("sandbox").parent / "scripts" / "docker"
    if script.exists() and os.geteuid() == 0 and shutil.which("apt-get"):
        return unavailable(problem, f"'{script}' up makes a base without a registry")
    return unavailable(problem, "repl-rl sandbox build --base IMAGE (one that has pip and Python 3.11 or later)")

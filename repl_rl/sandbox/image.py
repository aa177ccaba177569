"""Image of the `docker` sandbox: its name and its build."""

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
"""Name that selects the package's own image in settings."""
BASE = "python:3.11-slim-bookworm"
_BASE_PYTHON = "3.11"
_OTHER_BASES = re.compile(r"(python:3\.11[-.\w]*|repl-rl-base:latest)")
"""Images that replace `BASE` if the daemon has one of them but not `BASE`."""
_FILES = ("sandbox/Dockerfile", "sandbox/requirements.txt")
_TOLD = re.compile(r"Step \d+/\d+ : |Pulling from |Pull complete|Collecting |Processing |Downloading |Installing ")
_LONGEST = 120
_UNREACHABLE = re.compile(r"registry|pull access denied|manifest|no such host|dial tcp|No such image", re.IGNORECASE)

_log = logging.getLogger(__name__)


def own_image() -> str:
    """Return the tag of the package's own image."""
    return named(*(asset(name).read_bytes() for name in _FILES))


def named(*contents: bytes) -> str:
    """Return the tag of an image that is built from these file contents. Other contents have another tag."""
    return f"{NAME}:{sha256(bytes(1).join(contents)).hexdigest()[:12]}"


async def build_missing() -> None:
    """Build the package's own image, and log each step. A cancelled build ends at its next message.

    Raises:
        SandboxUnavailable: the image cannot be built here; the message contains the command that helps.
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
        base: image with Python 3.11 or later and pip to build on; empty means `BASE`, or a similar one that the daemon
            has.
        wheels: folder with the wheels of the requirements; None means that this machine's pip or the image's fetches
            them.
        tag: tag of the image; empty means that of `own_image`.
        stop: event that ends the build at its next message.

    Raises:
        ConfigError: `wheels` is not a folder with wheels.
        SandboxUnavailable: no daemon answers, or the build failed.
    """
    if wheels is not None and not list(wheels.glob("*.whl")):
        raise ConfigError(
            "wheels", str(wheels), "give a folder that holds the wheels of ipykernel and its requirements"
        )
    client, tag = connect(), tag or own_image()
    base = base or _base(client)
    _log.warning("building the image %s on %s; this happens once", tag, base)
    # The build context contains the Dockerfile, the requirements and their wheels.
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
    """Return the major and minor version of an image's Python. The image is pulled if the daemon lacks it.

    Raises:
        SandboxUnavailable: the image is not available, or has no Python of version 3.11 or later.
    """
    import docker  # slow to import

    # The version of the default base is known without starting a container.
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
    """Download the wheels with this machine's pip. Unlike a container's pip, it knows its index, proxies and
    certificates."""
    options = ("--quiet", "--disable-pip-version-check", "--only-binary=:all:", f"--python-version={python}")
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "-d", str(folder), "-r", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        _log.warning("pip cannot fetch the image's wheels here (%s): the image's own pip is to", reason)
        # Without any wheel in the context, the Dockerfile uses the package index.
        for wheel in folder.iterdir():
            wheel.unlink()


def _run(client: Daemon, context: Path, tag: str, base: str, stop: Event) -> str:
    import docker  # slow to import

    said = "it said nothing"
    try:
        # `forcerm` also removes the container of a step that fails.
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


def _failed(base: str, reason: str) -> SandboxUnavailable:
    problem = f"its image could not be built on {base}: {' '.join(reason.split())}"
    if not _UNREACHABLE.search(reason):
        return unavailable(problem, "repl-rl sandbox build --wheels FOLDER (of what pip download ipykernel fetches)")
    # In a checkout, `scripts/docker` can make a base image without a registry.
    script = asset("sandbox").parent / "scripts" / "docker"
    if script.exists() and os.geteuid() == 0 and shutil.which("apt-get"):
        return unavailable(problem, f"'{script}' up makes a base without a registry")
    return unavailable(problem, "repl-rl sandbox build --base IMAGE (one that has pip and Python 3.11 or later)")

"""Builds the image of the `docker` sandbox."""

import shutil
import tempfile
from pathlib import Path

from repl_rl.assets import asset
from repl_rl.errors import ConfigError, SandboxUnavailable
from repl_rl.sandbox.daemon import connect
from repl_rl.sandbox.docker import IMAGE


def build(*, base: str = "python:3.11-slim-bookworm", wheels: Path | None = None, tag: str = IMAGE) -> str:
    """Build the image, and return its id.

    Args:
        base: image with Python 3.11 and pip to build on.
        wheels: folder with the wheels of ipykernel and its requirements, for machines without network.

    Raises:
        ConfigError: `wheels` is no folder with wheels.
        SandboxUnavailable: no daemon, or the build failed; the message has its last lines.
    """
    import docker  # heavy and optional

    if wheels is not None and not list(wheels.glob("*.whl")):
        raise ConfigError(
            "wheels", str(wheels), "give a folder that holds the wheels of ipykernel and its requirements"
        )
    client = connect()
    with tempfile.TemporaryDirectory() as context:
        shutil.copy(asset("sandbox/Dockerfile"), context)
        shutil.copytree(
            asset("sandbox/repl_kernel"), Path(context, "repl_kernel"), ignore=shutil.ignore_patterns("__pycache__")
        )
        Path(context, "wheels").mkdir()
        for wheel in wheels.glob("*.whl") if wheels is not None else ():
            shutil.copy(wheel, Path(context, "wheels"))
        try:
            image, _ = client.images.build(path=context, tag=tag, buildargs={"BASE": base}, rm=True)
        except docker.errors.BuildError as error:
            said = "".join(str(entry.get("stream", "")) for entry in error.build_log)
            raise SandboxUnavailable(f"the image could not be built: {error.msg}\n{said[-2000:]}") from error
        except docker.errors.APIError as error:
            raise SandboxUnavailable(f"the image could not be built: {error.explanation}") from error
    return image.id

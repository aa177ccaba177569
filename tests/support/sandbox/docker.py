"""Marker of tests that need a Docker daemon with the sandbox image."""

import subprocess

import pytest

from repl_rl.sandbox.docker import (
    get_default_image,
)


def _missing() -> str:
    found = subprocess.run(
        ["sh", "-c", f"docker image inspect {get_default_image()}"], capture_output=True, check=False
    )
    return "" if found.returncode == 0 else "no Docker daemon with the sandbox image; .ci/run makes both"


needs_docker = pytest.mark.skipif(bool(_missing()), reason=_missing())

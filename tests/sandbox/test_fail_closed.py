"""Where isolation cannot be had, a sandbox refuses and names the fix; nothing weaker is used instead."""

import asyncio
from pathlib import Path

import pytest

from repl_rl.errors import ConfigError, SandboxUnavailable
from repl_rl.sandbox import Limits, open_sandbox


def test_without_bubblewrap_local_refuses_and_names_three_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        SandboxUnavailable, match=r"apt-get install bubblewrap.*--sandbox docker.*--sandbox unsafe"
    ) as info:
        open_sandbox("local")
    assert info.value.exit_code == 2


def test_a_bubblewrap_that_fails_is_a_refusal_with_its_own_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    async def main() -> None:
        async with open_sandbox("local"):
            pass

    with pytest.raises(SandboxUnavailable, match="No permissions to create new namespace"):
        asyncio.run(main())


def test_an_unknown_kind_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="choose one of local, docker"):
        open_sandbox("vm")


@pytest.mark.parametrize("field", ["line_timeout_s", "memory_mb", "output_bytes", "processes"])
def test_a_limit_of_zero_is_a_config_error(field: str) -> None:
    with pytest.raises(ConfigError, match=f"limits.{field}"):
        Limits(**{field: 0})  # type: ignore[arg-type]

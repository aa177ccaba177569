"""On a GPU vLLM's float32 is the trainer's: Triton's products are not cut to ten binary digits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from repl_rl.engine.vllm_setup import exact

PROGRAM = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def product(a, b, c, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))

floats = {"a": "*fp32", "b": "*fp32", "c": "*fp32", "N": "constexpr"}
made = triton.compile(ASTSource(fn=product, signature=floats, constexprs={"N": 32}), target=GPUTarget("cuda", 90, 32))
print(made.asm["ptx"])
"""


def made(folder: Path, variables: dict[str, str]) -> str:
    """What Triton makes of a product of two blocks in float32, as vLLM's attention asks for it, for an H100."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_F32_DEFAULT"}
    environment = {**kept, **variables, "TRITON_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_product_in_float32_is_made_of_float32s_where_it_would_be_made_of_tf32s(tmp_path: Path) -> None:
    usual, told = made(tmp_path, {}), made(tmp_path, dict(exact()))
    assert "tf32" in usual, "Triton's default has changed: look whether vLLM needs to be told at all"
    assert "tf32" not in told
    assert "fma.rn.f32" in told


def test_who_asks_triton_for_another_precision_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32x3")
    assert exact() == {"TRITON_F32_DEFAULT": "tf32x3"}

"""On a GPU vLLM's float32 is the trainer's: Triton's products are not cut to ten binary digits."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from repl_rl.engine.vllm_engine import get_exact_float_environment
from repl_rl.sft.create_random_model import make_random_policy
from repl_rl.trainer.config import TrainerConfig

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
    usual, told = made(tmp_path, {}), made(tmp_path, dict(get_exact_float_environment()))
    assert "tf32" in usual, "Triton's default has changed: look whether vLLM needs to be told at all"
    assert "tf32" not in told
    assert "fma.rn.f32" in told


def test_who_asks_triton_for_another_precision_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32x3")
    assert get_exact_float_environment() == {"TRITON_F32_DEFAULT": "tf32x3"}


def tf32(numbers: Tensor) -> Tensor:
    """Rounded to ten binary digits after the point, as the units that multiply TF32 take them."""
    return ((numbers.contiguous().view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, cut: Callable[[Tensor], Tensor]
) -> tuple[Tensor, None]:
    k, v = (one.repeat_interleave(q.size(1) // one.size(1), 1) for one in (k, v))
    seen = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril() if mask is None else mask
    shares = (cut(q) @ cut(k).transpose(-1, -2) * scaling).masked_fill(~seen, float("-inf")).softmax(-1)
    return (cut(shares) @ cut(v)).transpose(1, 2).contiguous(), None


def plain(
    module: object, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: object
) -> tuple[Tensor, None]:
    return _attend(q, k, v, mask, scaling, lambda numbers: numbers)


def rounded(
    module: object, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: object
) -> tuple[Tensor, None]:
    return _attend(q, k, v, mask, scaling, tf32)


def test_products_of_tf32_in_attention_alone_are_further_off_than_the_trainer_allows() -> None:
    """What was seen on an H200 (docs/gpu.md), without one."""
    AttentionInterface.register("tests_plain", plain)
    AttentionInterface.register("tests_rounded", rounded)
    for name in ("tests_plain", "tests_rounded"):
        AttentionMaskInterface.register(name, sdpa_mask)
    model = make_random_policy(384, 0, 2, hidden=256, layers=2, heads=4, context_tokens=256, seed=0).eval()
    ids = torch.randint(384, (8, 60), generator=torch.Generator().manual_seed(0))
    found = []
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(7.5)  # a policy that is sure of what it says
        for name in ("sdpa", "tests_plain", "tests_rounded"):
            model.set_attn_implementation(name)
            found.append(model(ids, attention_mask=torch.ones_like(ids)).logits.log_softmax(-1))
    usual, whole, cut = (logprobs.gather(-1, logprobs.argmax(-1, keepdim=True)) for logprobs in found)
    assert (whole - usual).abs().max() < TrainerConfig().compute_logprob_tolerance() / 10
    assert (cut - usual).abs().max() > TrainerConfig().compute_logprob_tolerance()

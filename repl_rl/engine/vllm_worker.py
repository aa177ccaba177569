"""What runs inside vLLM's worker: forbidden ids, a weight reload that holds for tied models too, and manners towards
the host.

vLLM mixes `PolicyWorker` into its own worker class; the host process calls its methods with `collective_rpc`.
"""

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, cast

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.platforms import current_platform

from repl_rl.engine.bars import without_semaphores
from repl_rl.engine.forbidden import present, silence

_stderr: int | None = None
"""Where stderr went before it was sent nowhere."""


class _Spec(Protocol):
    block_size: int
    page_size_bytes: int

    def max_memory_usage_bytes(self, vllm_config: object) -> int: ...


class _Group(Protocol):
    kv_cache_spec: _Spec


class _Cache(Protocol):
    num_blocks: int
    kv_cache_groups: Sequence[_Group]


class _Runner(Protocol):
    model: torch.nn.Module
    execute_model: Callable[..., object]
    kv_cache_config: _Cache
    vllm_config: object


class _Model(Protocol):
    compute_logits: Callable[..., torch.Tensor | None]


class _Worker(Protocol):
    model_runner: _Runner

    def get_model(self) -> _Model: ...

    def reload_weights(self, *, weights_path: str) -> None: ...


class PolicyWorker:
    """Methods added to vLLM's worker."""

    def policy_settle(self) -> None:
        """Leave interrupts to the host (Ctrl-C reaches the whole group), and leave quickly at the end."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        # the interpreter takes seconds to take vLLM apart module by module, and nothing of that is needed
        atexit.register(os._exit, 0)

    def policy_tell(self, file: str) -> None:
        """Write to `file` what a step of the model raises: vLLM's process dies over it and does not tell its host."""
        runner = cast(_Worker, self).model_runner
        step = runner.execute_model

        def told(*args: object, **kwargs: object) -> object:
            try:
                return step(*args, **kwargs)
            except Exception as error:
                Path(file).write_text(" ".join(f"{type(error).__name__}: {error}".split()), encoding="utf-8")
                raise

        runner.execute_model = told

    def policy_quiet(self, quiet: bool) -> None:
        """Send what this process writes to stderr nowhere, or there again."""
        global _stderr
        if quiet and _stderr is None:
            _stderr = os.dup(2)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 2)
            os.close(nowhere)
        elif not quiet and _stderr is not None:
            os.dup2(_stderr, 2)
            os.close(_stderr)
            _stderr = None

    def policy_forbid(self, ids: Sequence[int]) -> None:
        """Give `ids` probability 0 from now on, also after a reload; called once, at most."""
        if ids:
            forbid_logits(cast(_Worker, self).get_model(), ids)

    def policy_cache(self) -> tuple[int, Sequence[tuple[int, int]]]:
        """Blocks that sessions can have; for each kind of layer, the ids a block and the blocks of a full context."""
        runner = cast(_Worker, self).model_runner
        specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
        memory = [-(-spec.max_memory_usage_bytes(runner.vllm_config) // spec.page_size_bytes) for spec in specs]
        groups = list(zip((spec.block_size for spec in specs), memory, strict=True))
        return runner.kv_cache_config.num_blocks - 1, groups  # vLLM keeps one block that stands for none

    def policy_reload(self, folder: str) -> None:
        """Load the checkpoint in `folder` into the model, packed experts and tied output layers included."""
        worker = cast(_Worker, self)
        if current_platform.is_cpu():
            forget_packing(worker.model_runner.model)
        worker.reload_weights(weights_path=folder)
        repack_tied(worker.model_runner.model)


def forbid_logits(model: _Model, ids: Sequence[int]) -> None:
    """Silence `ids` where the model gives its logits.

    That is before vLLM takes raw log probabilities from them and before it samples, greedily or not: its own lists of
    allowed or bad ids come after, so that what it reports would be the log probabilities of another distribution.
    """
    inner = model.compute_logits
    index: dict[torch.device, torch.Tensor] = {}

    def compute_logits(*args: object, **kwargs: object) -> torch.Tensor | None:
        logits = inner(*args, **kwargs)
        if logits is None:  # on a rank of several that does not sample
            return None
        if logits.device not in index:
            index[logits.device] = present(ids, logits.size(-1), logits.device)
        return silence(logits, index[logits.device])

    model.compute_logits = compute_logits


def forget_packing(model: torch.nn.Module) -> None:
    """Let every layer of experts pack the weights of the next reload as it did those of the first load.

    vLLM's CPU kernels multiply by packed copies of experts. A layer that has its kernel already takes a reload for one
    whose weights need no packing, and would multiply by the plain ones as if they were packed.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def repack_tied(model: torch.nn.Module) -> None:
    """Give every output layer that shares an embedding's storage the new weights in its packed form as well.

    vLLM's CPU kernels multiply by a packed copy of the output layer. A reload finds no weights of that name in a
    tied checkpoint, so it repacks the embedding only, and the output layer silently keeps the old policy.
    """
    seen: dict[int, VocabParallelEmbedding] = {}
    for module in model.modules():
        if not isinstance(module, VocabParallelEmbedding):
            continue
        first = seen.setdefault(module.weight.data_ptr(), module)
        if first is not module and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            module.quant_method.process_weights_after_loading(module)


def _leave_with_the_host() -> None:
    host = multiprocessing.parent_process()
    if host is not None:
        host.join()
        os.kill(os.getpid(), signal.SIGKILL)  # nobody can take results any more, so nothing is worth tidying up


if multiprocessing.parent_process() is not None:
    # at import, which is the first moment of ours in this process: a host that is killed while vLLM starts must
    # not leave it behind
    threading.Thread(target=_leave_with_the_host, daemon=True, name="host watch").start()
    without_semaphores()

"""Extension of vLLM's worker: forbidden ids, weight reloads that include tied weights, and a quick exit.

vLLM mixes `PolicyWorkerExtension` into its own worker class; the host process calls its methods with `collective_rpc`.

vLLM imports this module in its own process, before the weights are loaded. The import asks for the AMX tile registers
of x86 processors. Linux gives them only to processes that ask. The import also starts a thread that kills
this process as soon as its host process has ended.
"""

import atexit
import ctypes
import multiprocessing
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, cast

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.platforms import current_platform

from repl_rl.engine.vllm_subprocess import disable_tqdm_semaphores
from repl_rl.models.transform_logits import mask_logits, select_existing_ids

_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XTILEDATA = 18
"""Numbers of Linux to request AMX tiles: Documentation/arch/x86/xstate.rst."""

_stderr: int | None = None
"""Copy of the original stderr while stderr is redirected."""


class _KvCacheSpec(Protocol):
    block_size: int
    page_size_bytes: int

    def max_memory_usage_bytes(self, vllm_config: object) -> int: ...


class _KvCacheGroup(Protocol):
    kv_cache_spec: _KvCacheSpec


class _KvCacheConfig(Protocol):
    num_blocks: int
    kv_cache_groups: Sequence[_KvCacheGroup]


class _ModelRunner(Protocol):
    model: torch.nn.Module
    execute_model: Callable[..., object]
    kv_cache_config: _KvCacheConfig
    vllm_config: object


class _LogitsModel(Protocol):
    compute_logits: Callable[..., torch.Tensor | None]


class _VllmWorker(Protocol):
    model_runner: _ModelRunner

    def get_model(self) -> _LogitsModel: ...

    def reload_weights(self, *, weights_path: str) -> None: ...


class PolicyWorkerExtension:
    """Methods added to vLLM's worker."""

    def policy_ignore_signals(self) -> None:
        """Ignore interrupts, and exit quickly at the end.

        Ctrl-C reaches the whole process group, and the host handles it.
        """
        # Only the main thread may set signal handlers.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The interpreter takes seconds to unload vLLM module by module, and none of that is needed.
        atexit.register(os._exit, 0)

    def policy_report_errors(self, file: str) -> None:
        """Write the error of a failing model step to `file`. vLLM's process dies of it without a report to its host."""
        runner = cast(_VllmWorker, self).model_runner
        step = runner.execute_model

        def run_and_report(*args: object, **kwargs: object) -> object:
            try:
                return step(*args, **kwargs)
            except Exception as error:
                # A single line, since the text becomes part of an error message.
                Path(file).write_text(" ".join(f"{type(error).__name__}: {error}".split()), encoding="utf-8")
                raise

        runner.execute_model = run_and_report

    def policy_silence_stderr(self, quiet: bool) -> None:
        """Discard what this process writes to stderr, or restore stderr."""
        global _stderr
        if quiet and _stderr is None:
            # Redirect the descriptor, since native code writes to it directly.
            _stderr = os.dup(2)
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 2)
            os.close(devnull)
        elif not quiet and _stderr is not None:
            os.dup2(_stderr, 2)
            os.close(_stderr)
            _stderr = None

    def policy_forbid_ids(self, ids: Sequence[int]) -> None:
        """Give `ids` probability 0 from now on, also after a reload. May be called at most once."""
        if ids:
            forbid_logits(cast(_VllmWorker, self).get_model(), ids)

    def policy_read_kv_layout(self) -> tuple[int, Sequence[tuple[int, int]]]:
        """Return the number of blocks for sessions, and per kind of layer the block size and the blocks of a full
        context.

        vLLM keeps one further block for itself.
        """
        runner = cast(_VllmWorker, self).model_runner
        specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
        # Rounded up.
        memory = [-(-spec.max_memory_usage_bytes(runner.vllm_config) // spec.page_size_bytes) for spec in specs]
        groups = list(zip((spec.block_size for spec in specs), memory, strict=True))
        # vLLM reserves one block as a placeholder.
        return runner.kv_cache_config.num_blocks - 1, groups

    def policy_reload_weights(self, folder: str) -> None:
        """Load the checkpoint in `folder` into the model, including packed experts and tied output layers."""
        worker = cast(_VllmWorker, self)
        if current_platform.is_cpu():
            reset_expert_packing(worker.model_runner.model)
        worker.reload_weights(weights_path=folder)
        repack_tied_outputs(worker.model_runner.model)


def forbid_logits(model: _LogitsModel, ids: Sequence[int]) -> None:
    """Mask the logits of `ids` directly after the model computes them.

    This is before vLLM computes raw log probabilities and before it samples, greedily or not. vLLM's own lists of
    allowed or bad ids apply later, so its log probabilities would belong to another distribution.
    """
    inner = model.compute_logits
    index: dict[torch.device, torch.Tensor] = {}

    def compute_logits(*args: object, **kwargs: object) -> torch.Tensor | None:
        logits = inner(*args, **kwargs)
        # On a rank that does not sample.
        if logits is None:
            return None
        if logits.device not in index:
            index[logits.device] = select_existing_ids(ids, logits.size(-1), logits.device)
        return mask_logits(logits, index[logits.device])

    model.compute_logits = compute_logits


def reset_expert_packing(model: torch.nn.Module) -> None:
    """Make every layer of experts pack its weights at the next reload, as at the first load.

    vLLM's CPU kernels multiply by packed copies of experts. A layer that already has its kernel skips the packing on a
    reload. It would then use the plain weights as if they were packed.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def repack_tied_outputs(model: torch.nn.Module) -> None:
    """Pack the new weights of every output layer that shares the storage of an embedding.

    vLLM's CPU kernels multiply by a packed copy of the output layer. A tied checkpoint has no weights of that name, so
    a reload packs the embedding only. Without this function the output layer silently keeps the old policy.
    """
    first_modules: dict[int, VocabParallelEmbedding] = {}
    for module in model.modules():
        if not isinstance(module, VocabParallelEmbedding):
            continue
        # The first module of a storage is the embedding, which the reload has packed.
        first = first_modules.setdefault(module.weight.data_ptr(), module)
        if first is not module and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            module.quant_method.process_weights_after_loading(module)


def request_amx_tiles() -> bool:
    """Ask for the AMX tile registers, for this process and those it forks. Return True if it may use them.

    vLLM 0.32 multiplies bfloat16 matrices below 1 MiB with these registers and does not ask, so that the first forward
    pass of a small model kills its process.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0)


def _exit_with_host() -> None:
    """Wait for the end of the host process, then kill this one."""
    host = multiprocessing.parent_process()
    if host is not None:
        host.join()
        # No process can receive results any more, so no cleanup is needed.
        os.kill(os.getpid(), signal.SIGKILL)


# At import, so that the registers are there when the weights are loaded.
request_amx_tiles()
if multiprocessing.parent_process() is not None:
    # At import, the earliest moment for our code in this process. It must not outlive a host that is killed while vLLM
    # starts.
    threading.Thread(target=_exit_with_host, daemon=True, name="host watch").start()
    disable_tqdm_semaphores()

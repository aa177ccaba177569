"""Checks that vLLM can run a model on this machine, without starting vLLM's process."""

import json
from pathlib import Path

import transformers
from vllm import ModelRegistry
from vllm.platforms import current_platform

from repl_rl.engine.checkpoint import INDEX, WHOLE
from repl_rl.engine.names import causal_class, read_config
from repl_rl.engine.options import Dtype
from repl_rl.engine.recurrent import keeps_running_state
from repl_rl.errors import ConfigError

_REMEDY = "choose another model, or --engine transformers"
_STUCK = frozenset({"GptOssForCausalLM"})
"""Models whose loader in vLLM bypasses the hooks of a reload, so that the old experts stay without an error."""


def refuse_unserved(folder: Path, dtype: Dtype) -> None:
    """Reject a model that vLLM has no class for, or whose class it cannot load or run here with this dtype.

    Raises:
        ConfigError: vLLM cannot run the model, or the folder has no index but more safetensors files than
            `model.safetensors`.
    """
    named = _architectures(folder)
    # Without an index, vLLM loads every safetensors file in the folder.
    others = sorted({file.name for file in folder.glob("*.safetensors")} - {WHOLE})
    if others and not (folder / INDEX).is_file():
        remedy = f"vLLM would read it beside {WHOLE}, as no {INDEX} says what belongs together; move it away"
        raise ConfigError(f"file in {folder}", others[0], remedy)
    served = next((name for name in named if name in ModelRegistry.get_supported_archs()), None)
    if served is None:
        # Without its own class for the model, vLLM may still drive that of transformers.
        if not any(_driven(name) for name in named):
            raise ConfigError("architecture", ", ".join(named) or None, f"this vLLM has no such model; {_REMEDY}")
    # On a GPU only vLLM's own process imports the model's module, because the module may touch the GPU.
    elif current_platform.is_cpu():
        try:
            ModelRegistry.models[served].load_model_cls()
        # A missing package can raise any exception here.
        except Exception as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ConfigError("architecture", served, f"this vLLM cannot load it: {reason}; {_REMEDY}") from error
        _refuse_on_cpu(folder, served, dtype)


def _refuse_on_cpu(folder: Path, served: str, dtype: Dtype) -> None:
    """Reject layers that vLLM's CPU kernels compute differently, or cannot compute.

    Raises:
        ConfigError: the model has such layers.
    """
    kind, config = causal_class(read_config(folder))
    text = config.get_text_config()
    if hasattr(text, "linear_key_head_dim"):
        if dtype != "bfloat16":
            remedy = "vLLM computes linear attention on a CPU in bfloat16 alone; use a GPU, or --engine transformers"
            raise ConfigError(f"architecture {served} with dtype", dtype, remedy)
    elif keeps_running_state(kind, config):
        remedy = "vLLM loses its running state on a CPU when several rollouts are under way; use a GPU, or "
        remedy += "--engine transformers"
        raise ConfigError("architecture", served, remedy)


def refuse_stuck(folder: Path) -> None:
    """Reject a model that vLLM can sample, but whose weights it does not replace or that it computes too imprecisely.

    Raises:
        ConfigError: the model cannot be trained with vLLM on this machine.
    """
    stuck = _STUCK.intersection(_architectures(folder))
    if stuck:
        raise ConfigError("architecture", min(stuck), f"this vLLM does not take new weights of it; {_REMEDY}")
    # Only models with latent attention (MLA) have this setting.
    latent = getattr(read_config(folder).get_text_config(), "kv_lora_rank", None)
    if latent and current_platform.is_cpu():
        remedy = f"vLLM's latent attention on a CPU is tenths of a nat from the trainer's; {_REMEDY}"
        raise ConfigError("kv_lora_rank", latent, remedy)


def _architectures(folder: Path) -> list[str]:
    named: list[str] | None = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures")
    return named or []


def _driven(name: str) -> bool:
    """Return True if vLLM can drive transformers' class `name`."""
    kind = getattr(transformers, name, None)
    return kind is not None and issubclass(kind, transformers.PreTrainedModel) and bool(kind.is_backend_compatible())

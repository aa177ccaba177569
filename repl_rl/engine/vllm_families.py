"""Which models vLLM can run on this machine, asked of it without starting its process."""

import json
from pathlib import Path

import transformers
from vllm import ModelRegistry
from vllm.platforms import current_platform

from repl_rl.errors import ConfigError

_REMEDY = "choose another model, or --engine transformers"


def refuse_unserved(folder: Path) -> None:
    """Refuse a model that vLLM has no class for, or whose class it cannot load here.

    Raises:
        ConfigError: so it is.
    """
    named = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    served = next((name for name in named if name in ModelRegistry.get_supported_archs()), None)
    if served is None:
        if not any(_driven(name) for name in named):
            raise ConfigError("architecture", ", ".join(named) or None, f"this vLLM has no such model; {_REMEDY}")
    elif current_platform.is_cpu():  # elsewhere its modules are left to vLLM's own process: they may touch the GPU
        try:
            ModelRegistry.models[served].load_model_cls()
        except Exception as error:  # whatever a package that is missing here makes of it
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ConfigError("architecture", served, f"this vLLM cannot load it: {reason}; {_REMEDY}") from error


def _driven(name: str) -> bool:
    """Whether vLLM can drive transformers' own class of that name."""
    kind = getattr(transformers, name, None)
    return kind is not None and issubclass(kind, transformers.PreTrainedModel) and bool(kind.is_backend_compatible())

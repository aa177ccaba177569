"""Adapters in PEFT's format, merged once into the weights of their base."""

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.machine.folders import whole_folder
from repl_rl.origin.stamp import stamp

_CONFIG = "adapter_config.json"
_CODE = ("megatron_config",)
"""Keys that make PEFT import the module that another key names; older versions of PEFT import any."""
_WEIGHTS = "adapter_model.safetensors"
_TOKENIZER_FILES = ("*token*", "vocab*", "merges*", "chat_template*")


def holds_adapters(folder: Path) -> bool:
    """Return True if the folder has adapters, and no model."""
    return (folder / _CONFIG).is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path) -> str:
    """Return the base of the adapters in `folder`: a folder, a file, or a name of the hub with its revision, if given.

    Raises:
        ConfigError: the adapters name no base, or their config names code.
    """
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        base, revision = config.get("base_model_name_or_path"), config.get("revision")
        code = [key for key in _CODE if config.get(key)]
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError("adapters", str(folder), f"their {_CONFIG} cannot be read: {error}") from error
    if code:
        remedy = f"{code[0]} in {_CONFIG} names modules for PEFT to import; no adapters need them here, so remove it"
        raise ConfigError("adapters", str(folder), remedy)
    if not base:
        raise ConfigError("adapters", str(folder), f"write their base as base_model_name_or_path into {_CONFIG}")
    return f"{base}@{revision}" if revision and not Path(base).exists() else str(base)


def merge(folder: Path, base: Path, place: Path, tell: Callable[[str], None]) -> Path:
    """Merge the adapters in `folder` into the model in `base`, as a folder in `place` that is made once.

    The tokenizer is that of the adapters, or else of the base.

    Raises:
        ConfigError: PEFT is not installed, or the adapters do not fit the base.
    """
    if not (folder / _WEIGHTS).is_file():
        raise ConfigError("adapters", str(folder), f"they have no {_WEIGHTS}; save them with safetensors")
    if find_spec("peft") is None:
        raise ConfigError("adapters", str(folder), "they need the package peft: pip install 'repl_rl[lora]'")
    # The stamp covers both sides, so a new base or new adapters are merged again.
    of = (folder / _CONFIG, folder / _WEIGHTS, base / "config.json", *sorted(base.glob("*.safetensors")))
    made = place / f"{folder.resolve().name}-{stamp(*(file for file in of if file.is_file()))}"
    if not made.is_dir():
        tell(f"merging the adapters in {folder} with {base} into {made} ...")
        _merge(folder, base, made)
    return made


def _merge(folder: Path, base: Path, made: Path) -> None:
    # Import here, because it takes seconds and a merge happens once.
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(base)
        # A stranger's config may name kernels, which transformers would download from the hub.
        config._attn_implementation = config._experts_implementation = None
        plain = AutoModelForCausalLM.from_pretrained(base, config=config, dtype="auto")
        model = PeftModel.from_pretrained(plain, str(folder))
        needed, there = set(get_peft_model_state_dict(model)), set(load_file(folder / _WEIGHTS))
        whole = model.merge_and_unload(safe_merge=True)
    # PEFT's errors about foreign files have no common base class.
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        remedy = f"they cannot be merged with {base}: {reason}; give the base that they were trained on"
        raise ConfigError("adapters", str(folder), remedy) from error
    # PEFT loads incomplete adapters without an error, so compare the names of the weights.
    if missing := sorted(needed - there):
        remedy = f"they do not fit {base}: {missing[0]} is not among them; give the base that they were trained on"
        raise ConfigError("adapters", str(folder), remedy)
    with whole_folder(made) as torn:
        whole.save_pretrained(torn)
        tokenizer = folder if any(folder.glob("tokenizer*")) else base
        for file in (file for pattern in _TOKENIZER_FILES for file in tokenizer.glob(pattern)):
            shutil.copy(file, torn)

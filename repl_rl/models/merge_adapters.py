"""Adapters in PEFT's format, merged once into the weights of their base."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from repl_rl.errors import ConfigError
from repl_rl.models.convert_gguf import compute_stamp
from repl_rl.models.describe_load_error import copy_generation_config, describe_load_error, make_savable
from repl_rl.models.validate_weights import load_validated_config
from repl_rl.utils.atomic_files import replace_folder_atomically

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_CODE = ("megatron_config",)
"""Keys that make PEFT import the module that another key names; older versions of PEFT import any."""
_SELECTIONS = ("target_modules", "exclude_modules", "feedforward_modules")
"""Keys with a list of names, or one regular expression."""
_NAMES = ("modules_to_save", "layers_pattern", "rank_pattern", "alpha_pattern")
"""Keys whose names PEFT puts into regular expressions."""
_PLAIN = re.compile(r"\^?([\w-]|\\?\.)+\$?")
"""Plain module name, the only form of a regular expression that is accepted where no time limit applies."""
_MAX_BASE_CHARS = 255
"""Length limit of the base's name."""
_RANKS = ("r", "init_r", "target_r", "num_virtual_tokens")
"""Keys with a size for which PEFT takes memory."""
_MATCH_S = 2
"""CPU time limit to match all names of a model, seconds."""
_MATCH = """
import json, re, resource, sys
seconds, pattern, names = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
print(json.dumps([name for name in names if re.fullmatch(pattern, name)]))
"""
"""Program that matches names, in a process whose CPU time is limited."""
_TOKENIZER_FILES = ("*token*", "vocab*", "merges*", "chat_template*")


class _Shaped(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...


def has_only_adapters(folder: Path) -> bool:
    """Return True if the folder has adapters, and no model."""
    return (folder / _CONFIG).is_file() and not (folder / "config.json").is_file()


def read_base_model(folder: Path) -> str:
    """Return the base of the adapters in `folder`: a folder, a file, or a name of the hub with its revision, if given.

    Raises:
        ConfigError: the adapters name no base, or their config names code.
    """
    config = _read_config(folder)
    # Refuse code, then values of other types than PEFT expects.
    code = [key for key in _CODE if config.get(key)]
    if code:
        remedy = f"{code[0]} in {_CONFIG} names modules for PEFT to import; no adapters need them here, so remove it"
        raise ConfigError("adapters", str(folder), remedy)
    for key in ("base_model_name_or_path", "revision"):
        if not isinstance(config.get(key), str | None):
            raise _make_config_error(folder, key, config[key], "write a text")
    for key in _SELECTIONS:
        if not isinstance(config.get(key), str) and _list_names(config.get(key)) is None:
            raise _make_config_error(folder, key, config[key], "write a list of names, or a regular expression")
    # A regular expression of a stranger may never end. Here, no adapters need more than names.
    for key in _NAMES:
        names = _list_names(config.get(key))
        if names is None or not all(map(_PLAIN.fullmatch, names)):
            raise _make_config_error(folder, key, config[key], "write plain names of modules")
    base, revision = str(config.get("base_model_name_or_path") or ""), config.get("revision")
    if not base:
        raise ConfigError("adapters", str(folder), f"write their base as base_model_name_or_path into {_CONFIG}")
    # The system refuses to look for longer names.
    if len(base) > _MAX_BASE_CHARS or any(
        len(part.encode("utf-8", "replace")) > _MAX_BASE_CHARS for part in Path(base).parts
    ):
        raise _make_config_error(folder, "base_model_name_or_path", base, f"write at most {_MAX_BASE_CHARS} characters")
    return f"{base}@{revision}" if revision and not Path(base).exists() else base


def merge_adapters_into_folder(folder: Path, base: Path, cache_folder: Path, log: Callable[[str], None]) -> Path:
    """Merge the adapters in `folder` into the model in `base`, as a folder in `cache_folder` that is made once.

    The tokenizer is that of the adapters, or else of the base.

    Raises:
        ConfigError: PEFT is not installed, or the adapters do not fit the base.
    """
    if not (folder / _WEIGHTS).is_file():
        raise ConfigError("adapters", str(folder), f"they have no {_WEIGHTS}; save them with safetensors")
    if find_spec("peft") is None:
        raise ConfigError("adapters", str(folder), "they need the package peft: pip install 'repl_rl[lora]'")
    # The stamp covers both sides, so a new base or new adapters are merged again.
    inputs = (folder / _CONFIG, folder / _WEIGHTS, base / "config.json", *sorted(base.glob("*.safetensors")))
    merged_folder = (
        cache_folder / f"{folder.resolve().name}-{compute_stamp(*(file for file in inputs if file.is_file()))}"
    )
    if not merged_folder.is_dir():
        log(f"merging the adapters in {folder} with {base} into {merged_folder} ...")
        _write_merged_model(folder, base, merged_folder)
    return merged_folder


def _read_config(folder: Path) -> Mapping[str, object]:
    try:
        config: object = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("adapters", str(folder), f"their {_CONFIG} cannot be read: {error}") from error
    return config


def _list_names(value: object) -> Sequence[str] | None:
    """Return the names in a value of the config: a list, the keys of an object, or one text. None for anything else."""
    names = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(names, list | dict) or not all(isinstance(name, str) for name in names):
        return None
    return list(names)


def _make_config_error(folder: Path, key: str, value: object, remedy: str) -> ConfigError:
    return ConfigError("adapters", str(folder), f"{key} in their {_CONFIG} is {str(value)[:80]!r}; {remedy}")


def _write_merged_model(folder: Path, base: Path, merged_folder: Path) -> None:
    # Import here, because it takes seconds and a merge happens once.
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    try:
        weights = load_file(folder / _WEIGHTS)
        _validate_ranks(folder, weights)
        config = load_validated_config(base)
        base_model, loading_info = AutoModelForCausalLM.from_pretrained(
            base,
            config=config,
            dtype="auto",
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
        # transformers initializes missing weights at random.
        if loading_info["missing_keys"]:
            raise ValueError(f"the base has no {min(loading_info['missing_keys'])}")
        # Replace regular expressions by the names that they match, so that PEFT matches none itself.
        peft_config = PeftConfig.from_pretrained(str(folder))
        modules = [name for name, _ in base_model.named_modules()]
        for key in _SELECTIONS:
            pattern = getattr(peft_config, key, None)
            if isinstance(pattern, str) and pattern.lower() != "all-linear":
                setattr(peft_config, key, _select_matching(folder, key, pattern, modules))
        model = PeftModel.from_pretrained(base_model, str(folder), config=peft_config)
        required, available = set(get_peft_model_state_dict(model)), set(weights)
        merged = model.merge_and_unload(safe_merge=True)
    except ConfigError:
        raise
    # PEFT's errors about foreign files have no common base class.
    except Exception as error:
        remedy = (
            f"they cannot be merged with {base}: {describe_load_error(error)}; give the base that they were trained on"
        )
        raise ConfigError("adapters", str(folder), remedy) from error
    # PEFT loads incomplete adapters without an error, so compare the names of the weights.
    if missing := sorted(required - available):
        remedy = f"they do not fit {base}: {missing[0]} is not among them; give the base that they were trained on"
        raise ConfigError("adapters", str(folder), remedy)
    make_savable(merged)
    with replace_folder_atomically(merged_folder) as target:
        merged.save_pretrained(target)
        copy_generation_config(base, target)
        tokenizer = folder if any(folder.glob("tokenizer*")) else base
        for file in (file for pattern in _TOKENIZER_FILES for file in tokenizer.glob(pattern)):
            shutil.copy(file, target)


def _validate_ranks(folder: Path, weights: Mapping[str, _Shaped]) -> None:
    """Check ranks and repeated layers against the weights, since PEFT first takes memory for what the config claims."""
    largest = max((size for weight in weights.values() for size in weight.shape), default=0)
    config = _read_config(folder)
    ranks = config.get("rank_pattern")
    claims = {key: config.get(key) for key in _RANKS} | (ranks if isinstance(ranks, dict) else {})
    for key, value in claims.items():
        if isinstance(value, int | float) and value > largest:
            raise _make_config_error(
                folder, key, value, f"no dimension of their weights is larger than {largest}; get them again"
            )
    spans = config.get("layer_replication") or []
    if not isinstance(spans, list) or sum(_count_repeated_layers(span) for span in spans) > len(weights):
        raise _make_config_error(
            folder, "layer_replication", spans, f"they have {len(weights)} weights; get them again"
        )


def _count_repeated_layers(value: object) -> int:
    """Return the number of layers in a range `[start, end]`, where `end` is exclusive. Any other value gives 0."""
    pair = value if isinstance(value, list) else []
    first, last = pair if len(pair) == 2 else (0, 0)
    return max(last - first, 0) if isinstance(first, int) and isinstance(last, int) else 0


def _select_matching(folder: Path, key: str, pattern: str, names: Sequence[str]) -> Sequence[str]:
    """Return the names that a regular expression matches. Matching runs in a process that ends at a limit.

    Raises:
        ConfigError: it is not a regular expression, exceeds the limit, or no target matches.
    """
    request = json.dumps([_MATCH_S, pattern, names])
    result = subprocess.run(
        [sys.executable, "-I", "-c", _MATCH], input=request, capture_output=True, text=True, check=False
    )
    matches: Sequence[str] = json.loads(result.stdout) if result.returncode == 0 else []
    if result.returncode != 0:
        remedy = f"it is not a regular expression, or takes more than {_MATCH_S} s; write a list of names"
        raise _make_config_error(folder, key, pattern, remedy)
    if not matches and key == "target_modules":
        remedy = "it matches no module of their base; give the base that they were trained on"
        raise _make_config_error(folder, key, pattern, remedy)
    return matches

"""Conversion between the weight names of a model in memory and those of its checkpoint, which every engine uses.

In memory, transformers fuses the experts of a layer, shortens the prefix of a composite model's text part, and has a
tied output layer twice. `from_pretrained` and `save_pretrained` convert in both directions. This module has no table of
names. It uses the same conversions, for weights (`rename_to_checkpoint`, `copy_with_weights`) and for shapes alone
(`load_skeleton`).
"""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.logging import disable_progress_bar, get_logger

from repl_rl.errors import ConfigError, EngineError
from repl_rl.models.describe_load_error import copy_generation_config, describe_load_error
from repl_rl.models.safetensors_index import INDEX, WHOLE, WeightShapes, list_checkpoint_files, read_checkpoint_shapes

StateDict = Mapping[str, Tensor]
_PROCESSORS = ("*processor_config.json", "processor.json")


@dataclass(frozen=True, slots=True)
class ModelSkeleton:
    """Model without its weights."""

    model: PreTrainedModel
    """The model as the trainer loads it, on the meta device."""
    checkpoint_shapes: WeightShapes
    """Shapes of all weights in its checkpoint."""
    trained_shapes: WeightShapes
    """Shapes of the weights that training changes, as the trainer sends them to engines. Parts of a composite model
    other than its text part are left out. A tied output layer is also left out, even if the checkpoint stores it."""


def load_skeleton(folder: Path) -> ModelSkeleton:
    """Load and save the model in `folder` without its weights, and compare the shapes: a dry run of every weight sync.

    Raises:
        ConfigError: there is no causal language model, or its checkpoint is incomplete; or trained weights would be
            saved under other names or shapes than they were stored.
    """
    file = folder / "config.json"
    # The modification time is part of the cache key: a changed folder is read again.
    return _load_skeleton(folder.resolve(), file.stat().st_mtime_ns if file.is_file() else 0)


def rename_to_checkpoint(model: PreTrainedModel, state: StateDict) -> dict[str, Tensor]:
    """Return the weights in `state` of `model` under the names of its checkpoint; tied ones appear once."""
    tied: Mapping[str, str] = model.all_tied_weights_keys
    ignored = set(model._keys_to_ignore_on_save or ())
    saved_weights = {name: w for name, w in state.items() if tied.get(name) not in state and name not in ignored}
    stored: dict[str, Tensor] = revert_weight_conversion(model, saved_weights)
    return stored


def copy_with_weights(model: PreTrainedModel, state: StateDict) -> PreTrainedModel:
    """Return a model like `model`, with the same device and dtype, and the weights of `state`.

    `state` has the names of a checkpoint. Weights that `model` has no place for are left out.

    Raises:
        EngineError: a weight is missing, or has another shape.
    """
    device = next(model.parameters()).device
    return _build_model(type(model), model.config, state, device, model.dtype, model.config._attn_implementation)


def complete_checkpoint(folder: Path, base: Path) -> None:
    """Complete the checkpoint in `folder`, if only the text part of the model in `base` was loaded and saved.

    It gets the processors and generation settings of `base`. For a composite model it also gets its configuration, and
    a separate file with every weight that training did not change. So it loads wherever `base` does. All other content
    stays as `save_pretrained` wrote it.
    """
    for file in (file for pattern in _PROCESSORS for file in base.glob(pattern)):
        shutil.copy(file, folder)
    copy_generation_config(base, folder)
    config = read_config(base)
    if resolve_causal_class(config)[1] is config:
        return
    skeleton = load_skeleton(base)
    # Stored names of tied weights. The saved checkpoint has these weights under another name.
    empty = torch.empty(0, device="meta")
    tied_names = rename_to_checkpoint(skeleton.model, dict.fromkeys(skeleton.model.all_tied_weights_keys, empty))
    rest = skeleton.checkpoint_shapes.keys() - skeleton.trained_shapes.keys() - tied_names.keys()
    # Two files need an index. A single file is renamed, since its standard name means that there is no other.
    single_file = folder / WHOLE
    if single_file.is_file():
        single_file.rename(folder / "model-trained.safetensors")
        weight_files = dict.fromkeys(skeleton.trained_shapes, "model-trained.safetensors")
    else:
        weight_files = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    save_file(_read_tensors(base, rest), folder / "model-untrained.safetensors", metadata={"format": "pt"})
    weight_files |= dict.fromkeys(sorted(rest), "model-untrained.safetensors")
    (folder / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": weight_files}, indent=2) + "\n", encoding="utf-8"
    )
    # Take the configuration of the whole model, with the dtype of the saved weights.
    saved_config, base_config = (
        json.loads((source / "config.json").read_text(encoding="utf-8")) for source in (folder, base)
    )
    base_config["dtype"] = base_config["text_config"]["dtype"] = saved_config.get("dtype")
    (folder / "config.json").write_text(json.dumps(base_config, indent=2) + "\n", encoding="utf-8")


def read_config(folder: Path) -> PretrainedConfig:
    """Read the configuration in `folder`.

    Raises:
        ConfigError: transformers does not know such a model.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # Unknown content of config.json can raise any exception.
    except Exception as error:
        raise ConfigError(
            "model folder", str(folder), f"transformers cannot read its config.json: {describe_load_error(error)}"
        ) from error
    # A config.json may name kernels, which transformers would download from the hub. Every caller chooses its own.
    config._attn_implementation = config._experts_implementation = None
    return config


def resolve_causal_class(config: PretrainedConfig) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """Return the class that `AutoModelForCausalLM` makes of `config`, and the configuration of that class.

    The configuration is that of the text part if the class has no other parts.

    Raises:
        ConfigError: transformers has no such class.
    """
    try:
        entry = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        remedy = "transformers has no causal language model of it, so it cannot be trained here; choose another"
        raise ConfigError("model_type", config.model_type, remedy) from None
    model_class: type[PreTrainedModel] = entry[0] if isinstance(entry, tuple | list) else entry
    text = config.sub_configs.get("text_config")
    return model_class, config.get_text_config() if text is not None and model_class.config_class == text else config


def _read_tensors(folder: Path, names: Set[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in list_checkpoint_files(folder):
        with safe_open(file, "pt") as tensor_file:
            tensors |= {name: tensor_file.get_tensor(name) for name in names & set(tensor_file.keys())}
    return tensors


@lru_cache(maxsize=8)
def _load_skeleton(folder: Path, _modified_ns: int) -> ModelSkeleton:
    model_class, config = resolve_causal_class(read_config(folder))
    try:
        stored_shapes = read_checkpoint_shapes(folder)
        meta = torch.device("meta")
        # Weights on the meta device have a shape, but no data.
        weights = {name: torch.empty(shape, device=meta) for name, shape in stored_shapes.items()}
        model = _build_model(model_class, config, weights, meta, torch.float32, "eager")
        trained_shapes = {name: tuple(w.shape) for name, w in rename_to_checkpoint(model, model.state_dict()).items()}
    except EngineError as error:
        raise ConfigError("model folder", str(folder), str(error)) from error
    # A conversion of weights that does not fit these shapes can raise any exception.
    except Exception as error:
        raise ConfigError(
            "model folder", str(folder), f"{model_class.__name__} cannot be made of it: {describe_load_error(error)}"
        ) from error
    # Compare the weights that a sync would write with those of the checkpoint, which the engine loads.
    if differing := sorted(name for name, shape in trained_shapes.items() if stored_shapes.get(name) != shape):
        name = differing[0]
        remedy = (
            f"its {model_class.__name__} would be saved with {len(differing)} weights that differ from the checkpoint: "
            f"{name} has shape {trained_shapes[name]}, and {stored_shapes.get(name)} in the checkpoint (None: absent), "
            "so no engine could load new weights; save it again with the installed transformers"
        )
        raise ConfigError("model folder", str(folder), remedy)
    return ModelSkeleton(model, stored_shapes, trained_shapes)


def _build_model(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    state: StateDict,
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
) -> PreTrainedModel:
    with _silence_loading_report():
        model, loading_info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=dict(state),
            dtype=dtype,
            device_map={"": device},
            attn_implementation=attention,
            # Otherwise an error refers to a table in the log.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    # transformers only logs missing weights, and initializes them at random.
    if faulty := sorted({*loading_info["missing_keys"], *(name for name, *_ in loading_info["mismatched_keys"])}):
        raise EngineError(
            f"{len(faulty)} weights of {model_class.__name__} are missing or have another shape, {faulty[0]} first; "
            "save the same model"
        )
    loaded: PreTrainedModel = model
    return loaded


@contextmanager
def _silence_loading_report() -> Iterator[None]:
    """Suppress the table in which transformers logs missing and unused weights. Here they are an error, or intended.

    Its progress bars stay disabled afterwards.
    """
    disable_progress_bar()
    logger = get_logger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

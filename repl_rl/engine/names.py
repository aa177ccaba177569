"""One policy, two ways to name its weights: that of the model in memory, and that of its checkpoint and every engine.

In memory transformers fuses the experts of a layer, shortens the prefix of a composite model's text part, and has a
tied output layer twice. It knows the way there and back, since `from_pretrained` and `save_pretrained` go it: there is
no table of names here, only the same two ways, for weights (`as_stored`, `renewed`) and for mere shapes (`outline`).
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

from repl_rl.engine.checkpoint import INDEX, WHOLE, Shapes, checkpoint_files, checkpoint_shapes
from repl_rl.errors import ConfigError, EngineError

State = Mapping[str, Tensor]
_PROCESSORS = ("*processor_config.json", "processor.json")


@dataclass(frozen=True, slots=True)
class Outline:
    """A model without its weights."""

    model: PreTrainedModel
    """As the trainer loads it, on the meta device."""
    stored: Shapes
    """Every weight of its checkpoint."""
    trained: Shapes
    """Those that training changes, as it gives them to engines; what a composite model has besides is not among them,
    nor is an output layer that is stored although it is the input embedding."""


def outline(folder: Path) -> Outline:
    """Load and save the model in `folder` without a weight, and compare: a dry run of every weight sync.

    Raises:
        ConfigError: no causal language model is there, its checkpoint is not whole, or what is trained of it would be
            saved under other names or shapes than it was stored.
    """
    file = folder / "config.json"
    return _outline(folder.resolve(), file.stat().st_mtime_ns if file.is_file() else 0)


def as_stored(model: PreTrainedModel, state: State) -> dict[str, Tensor]:
    """The weights of `state`, which is `model`'s, under the names of its checkpoint; tied ones once."""
    tied: Mapping[str, str] = model.all_tied_weights_keys
    ignored = set(model._keys_to_ignore_on_save or ())
    own = {name: w for name, w in state.items() if tied.get(name) not in state and name not in ignored}
    stored: dict[str, Tensor] = revert_weight_conversion(model, own)
    return stored


def renewed(model: PreTrainedModel, state: State) -> PreTrainedModel:
    """A model like `model`, on its device and in its number format, with the weights of `state`, as a checkpoint
    names them. Weights that `model` has no place for are left out.

    Raises:
        EngineError: one is missing, or has another shape.
    """
    device = next(model.parameters()).device
    return _loaded(type(model), model.config, state, device, model.dtype, model.config._attn_implementation)


def complete(folder: Path, base: Path) -> None:
    """Make what was saved in `folder` all of what `base` is, of which only the text part may have been loaded.

    It gets the processors of `base`, and of a composite model its configuration and every weight that training left
    alone, in a file beside. So it loads again wherever `base` does. All else is left as `save_pretrained` wrote it.
    """
    for file in (file for pattern in _PROCESSORS for file in base.glob(pattern)):
        shutil.copy(file, folder)
    config = read_config(base)
    if causal_class(config)[1] is config:
        return
    found = outline(base)
    nothing = torch.empty(0, device="meta")
    doubled = as_stored(found.model, dict.fromkeys(found.model.all_tied_weights_keys, nothing))
    rest = found.stored.keys() - found.trained.keys() - doubled.keys()
    whole = folder / WHOLE
    if whole.is_file():
        whole.rename(folder / "model-trained.safetensors")
        places = dict.fromkeys(found.trained, "model-trained.safetensors")
    else:
        places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    save_file(_picked(base, rest), folder / "model-untrained.safetensors", metadata={"format": "pt"})
    places |= dict.fromkeys(sorted(rest), "model-untrained.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}, indent=2) + "\n", encoding="utf-8")
    saved, said = (json.loads((place / "config.json").read_text(encoding="utf-8")) for place in (folder, base))
    said["dtype"] = said["text_config"]["dtype"] = saved.get("dtype")
    (folder / "config.json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def _picked(folder: Path, names: Set[str]) -> dict[str, Tensor]:
    picked: dict[str, Tensor] = {}
    for file in checkpoint_files(folder):
        with safe_open(file, "pt") as opened:
            picked |= {name: opened.get_tensor(name) for name in names & set(opened.keys())}
    return picked


def causal_class(config: PretrainedConfig) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """What `AutoModelForCausalLM` makes of `config`: a class, and what it is configured with, the text part alone
    where the class knows no more.

    Raises:
        ConfigError: there is no such class.
    """
    try:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        remedy = "transformers has no causal language model of it, so it cannot be trained here; choose another"
        raise ConfigError("model_type", config.model_type, remedy) from None
    chosen: type[PreTrainedModel] = found[0] if isinstance(found, tuple | list) else found
    text = config.sub_configs.get("text_config")
    return chosen, config.get_text_config() if text is not None and chosen.config_class == text else config


def read_config(folder: Path) -> PretrainedConfig:
    """The configuration in `folder`.

    Raises:
        ConfigError: transformers does not know such a model.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder)
    except Exception as error:  # whatever a foreign config.json makes of it
        raise ConfigError(
            "model folder", str(folder), f"transformers cannot read its config.json: {_line(error)}"
        ) from error
    # Kernels that a stranger's file names would be looked for on the hub; every caller says which it wants.
    config._attn_implementation = config._experts_implementation = None
    return config


@lru_cache(maxsize=8)
def _outline(folder: Path, _changed: int) -> Outline:
    kind, config = causal_class(read_config(folder))
    try:
        stored = checkpoint_shapes(folder)
        meta = torch.device("meta")
        weights = {name: torch.empty(shape, device=meta) for name, shape in stored.items()}
        model = _loaded(kind, config, weights, meta, torch.float32, "eager")
        trained = {name: tuple(w.shape) for name, w in as_stored(model, model.state_dict()).items()}
    except EngineError as error:
        raise ConfigError("model folder", str(folder), str(error)) from error
    except Exception as error:  # a conversion that does not fit these shapes
        raise ConfigError(
            "model folder", str(folder), f"{kind.__name__} cannot be made of it: {_line(error)}"
        ) from error
    if other := sorted(name for name, shape in trained.items() if stored.get(name) != shape):
        name = other[0]
        remedy = (
            f"its {kind.__name__} would be saved with {len(other)} other weights than it has: {name} as "
            f"{trained[name]}, stored as {stored.get(name)} (None: absent), so no engine could follow it; save it "
            "again with this transformers"
        )
        raise ConfigError("model folder", str(folder), remedy)
    return Outline(model, stored, trained)


def _loaded(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    state: State,
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
) -> PreTrainedModel:
    with _quiet():
        model, told = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(state),
            dtype=dtype,
            device_map={"": device},
            attn_implementation=attention,
            output_loading_info=True,
        )
    if wrong := sorted({*told["missing_keys"], *(name for name, *_ in told["mismatched_keys"])}):
        raise EngineError(
            f"{len(wrong)} weights of {kind.__name__} are missing or have another shape, {wrong[0]} first; "
            "save the same model"
        )
    loaded: PreTrainedModel = model
    return loaded


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers tells what is missing or left over in a table; here that is an error, or meant.

    Its progress bars are gone from then on.
    """
    disable_progress_bar()
    logger = get_logger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__

"""Loading of a model folder from elsewhere: a one-line reason why it failed, and generation settings."""

import json
from pathlib import Path

import transformers

_GENERATION = "generation_config.json"
_MAX_REASON_CHARS = 300


def describe_load_error(error: BaseException) -> str:
    """Return one line with the reason why transformers cannot load a folder."""
    if "trust_remote_code" in str(error):
        # transformers advises to run the folder's code, which no command does.
        return "it needs its own code (auto_map), which is never run; use a model of a family that transformers has"
    return " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__


def make_savable(model: "transformers.PreTrainedModel") -> None:
    """Keep only the token ids of the generation config, if transformers refuses to save this config.

    Published models have such a config, for example with a temperature but without `do_sample`. This package does not
    use its other settings. `copy_generation_config` keeps them for other programs.
    """
    settings = model.generation_config
    if settings is None:
        return
    try:
        settings.validate(strict=True)
    # A value of another type can fail in a comparison.
    except (ValueError, TypeError):
        ids = {name: getattr(settings, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.generation_config = transformers.GenerationConfig(**ids)


def copy_generation_config(base: Path, folder: Path) -> None:
    """Add the generation settings of the model in `base` to the generation settings that were saved in `folder`.

    If both have a setting, the value in `folder` is kept.
    """
    if not (base / _GENERATION).is_file():
        return
    target = folder / _GENERATION
    settings = json.loads((base / _GENERATION).read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        return
    # The saved settings come last, because they win.
    if target.is_file():
        settings |= json.loads(target.read_text(encoding="utf-8"))
    target.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")

"""Loading of the policy to train."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from repl_rl.errors import ConfigError
from repl_rl.models.describe_load_error import make_savable
from repl_rl.models.disable_dropout import disable_dropout
from repl_rl.models.parameter_names import read_config, resolve_causal_class
from repl_rl.models.transform_logits import choose_attention
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.plugins.lora import add_adapters
from repl_rl.trainer.trl_arguments import loaded_dtype
from repl_rl.trainer.weight_sync import WarnFn


def load_model(folder: Path, config: TrainerConfig) -> PreTrainedModel:
    """Load the policy to train: trained weights are float32; weights frozen under adapters are `config.dtype`.

    Raises:
        ConfigError: there is no loadable model, or config.json ties embeddings that the checkpoint does not tie.
    """
    if not folder.is_dir():
        raise ConfigError("model folder", str(folder), "there is no such folder")
    model_config = read_config(folder)
    dtype, attention = loaded_dtype(config), choose_attention(*resolve_causal_class(model_config))
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, config=model_config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError("model folder", str(folder), f"it cannot be loaded: {error}") from error
    # transformers keeps a separate output layer of a checkpoint, even if config.json ties it to the embeddings.
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.get_text_config().tie_word_embeddings and head is not None and head.weight is not embeddings.weight:
        remedy = "but the checkpoint has a separate output layer; set it to false in config.json"
        raise ConfigError("tie_word_embeddings", True, remedy)
    return model


def prepare_trainable_model(model: PreTrainedModel, config: TrainerConfig, seed: int, warn: WarnFn) -> PreTrainedModel:
    """Return `model` ready to be trained and saved, without dropout.

    Its trained weights are in float32: adapters drawn from `seed`, or else all weights. `warn` receives one line if the
    update leaves out a loss that the model defines.
    """
    _warn_about_router(model, config, warn)
    make_savable(model)
    disable_dropout(model)
    if config.lora_rank:
        return add_adapters(model, config.lora_rank, seed)
    return model if model.dtype == torch.float32 else model.float()


def _warn_about_router(policy: PreTrainedModel, config: TrainerConfig, warn: WarnFn) -> None:
    """Warn if the fast pass leaves out the load balancing loss of a mixture of experts."""
    text = policy.config.get_text_config()
    coefficient = getattr(text, "router_aux_loss_coef", 0.0) if hasattr(text, "output_router_logits") else 0.0
    if config.fast_logprobs and coefficient:
        warn(f"the router's loss (router_aux_loss_coef {coefficient}) is left out; set fast_logprobs = false to add it")

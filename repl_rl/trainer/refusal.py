"""What a model cannot do in training, known before an engine starts and before anything is written."""

import math
from collections.abc import Callable
from pathlib import Path

import torch

from repl_rl.engine import EngineKind
from repl_rl.engine.forbidden import refuse_unforbiddable
from repl_rl.engine.logits import Logits
from repl_rl.engine.names import outline
from repl_rl.errors import ConfigError
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.weights import room_for


def refuse_model(
    folder: Path, engine: EngineKind, config: TrainerConfig, forbidden_ids: Callable[[], frozenset[int]]
) -> None:
    """Refuse a model that cannot be trained so, from its configuration and the names and shapes of its weights.

    Each weight sync is run dry: what the trainer would write is what the checkpoint has, so every engine that has
    loaded the one can load the other. Takes less than a second.

    Args:
        folder: the model.
        engine: what will sample.
        config: settings of the update.
        forbidden_ids: ids that the sampler never gives; only asked for where forbidding one could fail.

    Raises:
        ConfigError: transformers does not know it, its weights are not whole or would be saved differently, its logits
            are not understood, the engine does not take new ones, an id cannot be forbidden, or there is no room for
            its weights on their way.
    """
    found = outline(folder)
    engine.check_sync(folder)
    if config.fast:
        Logits.of(found.model.config)
    try:
        refuse_unforbiddable(found.model)
    except ConfigError:
        if forbidden_ids():
            raise
    width = torch.finfo(getattr(torch, config.dtype)).bits // 8
    room_for(width * sum(map(math.prod, found.trained.values())))

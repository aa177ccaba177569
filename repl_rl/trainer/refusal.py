"""What cannot be trained, known before an engine starts and before anything is written."""

import math
from collections.abc import Callable
from pathlib import Path

from repl_rl.engine import ENGINES, EngineKind, Transformers, Vllm
from repl_rl.engine.dropout import refuse_random
from repl_rl.engine.forbidden import refuse_unforbiddable
from repl_rl.engine.logits import Logits
from repl_rl.engine.names import outline
from repl_rl.errors import ConfigError
from repl_rl.machine.launched import processes
from repl_rl.rollout import chosen_fleet
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.loop import credit_of
from repl_rl.trainer.sharded import refuse_unsharded
from repl_rl.trainer.weights import room_for
from repl_rl.world import World


def refuse_run(world: World, config: TrainerConfig, tasks: int, fleet: str = "local") -> None:
    """Refuse a run that could not be trained.

    Args:
        world: the policy and what it acts in.
        config: settings of the update.
        tasks: how many there are to draw from.
        fleet: where rollouts are played.

    Raises:
        ConfigError: there are too few tasks; sampler, prompt and policy do not fit each other; a setting of the update
            cannot be had, or not on this machine; or as `refuse_model`.
    """
    if tasks < config.prompts_per_step:
        remedy = f"a step takes {config.prompts_per_step} different ones; give more tasks, or lower it"
        raise ConfigError("training tasks", tasks, f"{remedy} (--trainer.prompts-per-step)")
    _refuse_apart(world, config)
    _refuse_idle(world, fleet)
    config.check_machine()
    config.share(processes())
    refuse_unsharded(processes(), config.lora_rank)
    if world.group_judge and config.prompts_per_step % processes():
        remedy = f"each of {processes()} processes must play whole groups; give a multiple of that many prompts a step"
        raise ConfigError("group_judge with prompts_per_step", config.prompts_per_step, remedy)
    credit_of(config)
    _, renderer = world.fitting()
    refuse_model(world.model_folder, ENGINES.chosen(world.engine), config, lambda: renderer.forbidden_ids)


def _refuse_apart(world: World, config: TrainerConfig) -> None:
    """Refuse rollouts ahead of the update where sampler and trainer cannot be at work at the same time, and what is for
    such rollouts alone where there are none."""
    engine = ENGINES.chosen(world.engine)
    if world.kv_on_sync == "keep" and not config.ahead:
        remedy = "without trainer.ahead no rollout is under way when weights change; give that too, or leave this out"
        raise ConfigError("kv_on_sync", world.kv_on_sync, remedy)
    without = None
    if processes() > 1:
        without = f"{processes()} processes play one step at a time; train in one"
    elif isinstance(engine, Vllm) and engine.sleep:
        without = "vLLM cannot sleep while it samples; leave vllm.sleep out"
    if config.ahead and without:
        raise ConfigError("trainer.ahead", config.ahead, f"{without}, or leave it at 0")


def _refuse_idle(world: World, fleet: str) -> None:
    """Refuse GPUs of a node that its engine would leave idle. What an engine of the user's takes is not known."""
    engine, chosen = ENGINES.chosen(world.engine), chosen_fleet(fleet)
    if chosen is not None and chosen.gpus > 1 and isinstance(engine, Vllm | Transformers):
        remedy = f"the engine {engine.kind} samples on one GPU, and the others of a node would be idle; leave it at 1"
        raise ConfigError("fleet.gpus", chosen.gpus, remedy)


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
            are not understood, it draws at random in training, the engine does not take new ones, an id cannot be
            forbidden, or there is no room for its weights on their way.
    """
    found = outline(folder)
    refuse_random(found.model.config)
    engine.check_sync(folder)
    if config.fast:
        Logits.of(found.model.config)
    try:
        refuse_unforbiddable(found.model)
    except ConfigError:
        if forbidden_ids():
            raise
    room_for(config.loaded_dtype.itemsize * sum(map(math.prod, found.trained.values())) * (2 if config.ahead else 1))

"""Validation of a training run before an engine starts and before anything is written."""

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
from repl_rl.trainer.grpo_config import check_machine, loaded_dtype
from repl_rl.trainer.loop import credit_of
from repl_rl.trainer.sharded import refuse_unsharded
from repl_rl.trainer.weights import room_for
from repl_rl.world import World


def refuse_run(world: World, config: TrainerConfig, tasks: int, fleet: str = "local") -> None:
    """Check that a run can be trained.

    Args:
        world: policy, tasks, engine, sandbox and limits of the rollouts.
        config: settings of the update.
        tasks: number of tasks to draw from.
        fleet: place of the rollouts, `local` or `ray`.

    Raises:
        ConfigError: there are too few tasks; sampler, prompt and policy do not fit each other; a setting of the update
            is not available, in general or on this machine; or `refuse_model` raises it.
    """
    # Cheap checks come first: the last ones load the tokenizer, and the names and shapes of the weights.
    if tasks < config.prompts_per_step:
        remedy = f"a step takes {config.prompts_per_step} different ones; give more tasks, or lower it"
        raise ConfigError("training tasks", tasks, f"{remedy} (--trainer.prompts-per-step)")
    _refuse_apart(world, config)
    _refuse_idle(world, fleet)
    check_machine(config)
    config.share(processes())
    refuse_unsharded(processes(), config.lora_rank)
    if world.group_judge and config.prompts_per_step % processes():
        remedy = f"each of {processes()} processes must play whole groups; give a multiple of that many prompts a step"
        raise ConfigError("group_judge with prompts_per_step", config.prompts_per_step, remedy)
    credit_of(config)
    _, renderer = world.fitting()
    refuse_model(world.model_folder, ENGINES.chosen(world.engine), config, lambda: renderer.forbidden_ids)


def _refuse_apart(world: World, config: TrainerConfig) -> None:
    """Check that sampler and trainer can work at the same time if rollouts are async.

    Without async rollouts, check that no setting is given that only they use.
    """
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
    """Check that the engine leaves no GPU of a worker idle; the needs of user-defined engines are unknown."""
    engine, chosen = ENGINES.chosen(world.engine), chosen_fleet(fleet)
    if chosen is not None and chosen.gpus > 1 and isinstance(engine, Vllm | Transformers):
        remedy = f"the engine {engine.kind} samples on one GPU, and the others of a node would be idle; leave it at 1"
        raise ConfigError("fleet.gpus", chosen.gpus, remedy)


def refuse_model(
    folder: Path, engine: EngineKind, config: TrainerConfig, forbidden_ids: Callable[[], frozenset[int]]
) -> None:
    """Check that a model can be trained, from its configuration and the names and shapes of its weights.

    This includes a dry run of the weight sync. The trainer would write the same names and shapes that the checkpoint
    has, so an engine that has loaded the checkpoint can load a sync. It takes less than a second.

    Args:
        folder: folder of the model.
        engine: the engine that samples.
        config: settings of the update.
        forbidden_ids: returns the ids that are never sampled; called only if forbidding one could fail.

    Raises:
        ConfigError: transformers does not know the model; its weights are incomplete or would be saved differently. Or
            its logits are not supported, it routes at random in training, the engine takes no new weights, an id
            cannot be forbidden, or a weight sync has no room for the weights.
    """
    found = outline(folder)
    refuse_random(found.model.config)
    engine.check_sync(folder)
    if config.fast:
        Logits.of(found.model.config)
    # A model that cannot forbid an id is fine if no id is forbidden.
    try:
        refuse_unforbiddable(found.model)
    except ConfigError:
        if forbidden_ids():
            raise
    # Async rollouts alternate between two folders of weights.
    room_for(loaded_dtype(config).itemsize * sum(map(math.prod, found.trained.values())) * (2 if config.ahead else 1))

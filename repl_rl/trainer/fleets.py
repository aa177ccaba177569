"""Choice of the rollout source of a run: this process, or workers on a Ray cluster."""

import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path

from repl_rl.machine.files import Json
from repl_rl.machine.launched import processes
from repl_rl.origin import BUNDLED
from repl_rl.rollout import Fleet, RolloutThread, chosen_fleet
from repl_rl.rollout.fleet.choice import OnRay
from repl_rl.rollout.fleet.members import Waits
from repl_rl.rollout.fleet.messages import Cluster, Setting
from repl_rl.rollout.fleet.source import NodeFleet, Plan
from repl_rl.tasks import Task
from repl_rl.trainer import apart
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.shared import FollowingFleet, LeadingFleet
from repl_rl.world import World


def fleet_for(world: World, tasks: Mapping[str, Task], fleet: str, rank: int = 0) -> AbstractContextManager[Fleet]:
    """Return the rollout source of a run, as a context manager.

    Args:
        world: rollout config, opened in this process or in every worker.
        tasks: training tasks, by id.
        fleet: `local`, `ray` or `ray://HOST:PORT`, with options in parentheses.
        rank: rank of this process among those that train together.

    Raises:
        ConfigError: `fleet` is unknown.
    """
    chosen = chosen_fleet(fleet)
    if chosen is None:
        return RolloutThread(partial(world.rollouts, rank), tasks)
    # Rank 0 owns the workers, and the other ranks get their rollouts from it.
    if rank:
        _, renderer = world.fitting()
        return FollowingFleet(renderer.forbidden_ids, tasks)
    kind = NodeFleet if processes() == 1 else LeadingFleet
    return kind(_on_ray(chosen), plan_of(world, chosen), tasks)


def beside(world: World, trainer: TrainerConfig) -> World:
    """Return `world` with a number format of the sampler whose log probabilities the trainer can check."""
    return replace(world, dtype=apart.sampler_dtype(trainer.dtype, world.dtype))


def plan_of(world: World, chosen: OnRay, waits: Waits | None = None, shared: bool = True) -> Plan:
    """Return the plan of a worker pool. Raises ConfigError: sampler, prompt and policy do not fit each other."""
    sampler, _ = world.fitting()
    limits = waits or Waits(patience_s=chosen.patience_s)
    host = bool(world.host_functions)
    return Plan(setting(world), sampler, world.rollout, host, world.concurrency, chosen.nodes, limits, shared)


def setting(world: World) -> Setting:
    """Return the settings by which a worker opens `world`, without other settings of the run."""
    # The settings of a command are a subclass of `World`, and a worker needs only the fields of `World`.
    plain = {field.name: getattr(world, field.name) for field in fields(World)}
    if world.model != BUNDLED and Path(world.model).exists():
        plain["model"] = str(world.model_folder.absolute())  # a name on the hub is resolved on each machine instead
    opener = pickle.dumps(partial(World(**plain).rollouts, 0))
    return Setting(opener, 0, os.getcwd(), tuple(place for place in sys.path if place))


def keep_notes(source: Fleet, run: Path) -> None:
    """Let a worker pool write its status and logs into the run folder; other sources write nothing."""
    if isinstance(source, NodeFleet):
        source.keep_notes(run)


def fleet_status(source: Fleet) -> dict[str, Json]:
    """Return the status of a worker pool for the run's summary; empty for other sources."""
    return {"fleet": source.status()} if isinstance(source, NodeFleet) else {}


@contextmanager
def _on_ray(chosen: OnRay) -> Iterator[Cluster]:
    # Imported here because Ray is an optional dependency.
    with import_module("repl_rl.rollout.fleet.ray").on_ray(chosen) as started:
        yield started.cluster

"""Where a run's rollouts are played: the world opened in this process, or on the nodes of a fleet."""

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
    """What plays the rollouts of a run, for the length of a `with`.

    Args:
        world: what is opened, here or on every node.
        tasks: those that are trained on, by id.
        fleet: `local`, `ray` or `ray://HOST:PORT`, with options in parentheses.
        rank: which of the processes that train together this is.

    Raises:
        ConfigError: there is no such fleet.
    """
    chosen = chosen_fleet(fleet)
    if chosen is None:
        return RolloutThread(partial(world.rollouts, rank), tasks)
    if rank:
        _, renderer = world.fitting()
        return FollowingFleet(renderer.forbidden_ids, tasks)
    kind = NodeFleet if processes() == 1 else LeadingFleet
    return kind(_on_ray(chosen), plan_of(world, chosen), tasks)


def beside(world: World, trainer: TrainerConfig) -> World:
    """The world as it is opened beside a trainer: its sampler's number format is one that can be held to its own."""
    return replace(world, dtype=apart.sampler_dtype(trainer.dtype, world.dtype))


def plan_of(world: World, chosen: OnRay, waits: Waits | None = None, shared: bool = True) -> Plan:
    """What a fleet of such nodes plays. Raises ConfigError: sampler, prompt and policy do not fit each other."""
    sampler, _ = world.fitting()
    limits = waits or Waits(patience_s=chosen.patience_s)
    host = bool(world.host_functions)
    return Plan(setting(world), sampler, world.rollout, host, world.concurrency, chosen.nodes, limits, shared)


def setting(world: World) -> Setting:
    """How a node opens this world, and no more of it: what else a run's settings say is not needed there."""
    plain = {field.name: getattr(world, field.name) for field in fields(World)}
    if world.model != BUNDLED and Path(world.model).exists():
        plain["model"] = str(world.model_folder.absolute())  # a name of the hub is looked for on each machine
    opener = pickle.dumps(partial(World(**plain).rollouts, 0))
    return Setting(opener, 0, os.getcwd(), tuple(place for place in sys.path if place))


def keep_notes(source: Fleet, run: Path) -> None:
    """Have a fleet of nodes write into the run's folder what they do; one process has nothing to write."""
    if isinstance(source, NodeFleet):
        source.keep_notes(run)


def fleet_status(source: Fleet) -> dict[str, Json]:
    """For the summary of a run: nothing of one process."""
    return {"fleet": source.status()} if isinstance(source, NodeFleet) else {}


@contextmanager
def _on_ray(chosen: OnRay) -> Iterator[Cluster]:
    # imported here: Ray is not always installed
    with import_module("repl_rl.rollout.fleet.ray").on_ray(chosen) as started:
        yield started.cluster

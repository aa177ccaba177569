"""Updates: time and memory beside TRL's trainer, shared prefixes, rollouts ahead of the update."""

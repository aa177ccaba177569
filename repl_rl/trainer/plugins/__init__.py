"""Optional parts of training: checkpoints, asynchronous rollouts, adapters, sharding, trackers."""

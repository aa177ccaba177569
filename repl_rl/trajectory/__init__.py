"""Record of a rollout: tokens, lines, trajectories, and their metrics. It uses no engine and no sandbox."""

"""From trajectories to one reward and one advantage a line."""

"""Credit assignment: from trajectories to one reward and one advantage per line."""

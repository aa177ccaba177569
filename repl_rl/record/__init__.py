"""What a rollout leaves: tokens, lines, trajectories, and their figures. It knows no engine and no sandbox."""

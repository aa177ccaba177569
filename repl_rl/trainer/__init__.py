"""Policy updates from trajectories, on TRL's GRPO trainer."""

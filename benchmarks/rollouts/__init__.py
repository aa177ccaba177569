"""Rollouts: sampled tokens per second beside other ways to play the same rollouts."""

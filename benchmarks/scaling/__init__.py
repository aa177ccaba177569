"""Rollout workers and console nodes on Ray: overhead and capacity."""

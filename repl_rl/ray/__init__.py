"""Rollouts on workers of a Ray cluster, and consoles on its machines."""

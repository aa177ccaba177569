"""Experiments and benchmarks: speed of each part, compared with other ways to do the same."""

"""Samplers beside the line console, and how one is found by its name."""

from repl_rl.samplers.loading import load_sampler, sampler_of, sampler_options

__all__ = ["load_sampler", "sampler_of", "sampler_options"]

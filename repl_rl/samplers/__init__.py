"""Samplers other than the line console, and their lookup by name."""

from repl_rl.samplers.loading import load_sampler, sampler_of, sampler_options

__all__ = ["load_sampler", "sampler_of", "sampler_options"]

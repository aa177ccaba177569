"""Samplers other than the line console, and their lookup by name."""

from repl_rl.samplers.load_sampler import SAMPLERS, choose_sampler, get_sampler_options, load_sampler

__all__ = ["SAMPLERS", "choose_sampler", "get_sampler_options", "load_sampler"]

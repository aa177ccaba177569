"""The cold start: a fresh policy, executed demonstrations of doctests and built-in tasks, supervised fine-tuning.

Only `repl_rl.coldstart.fresh` and `repl_rl.coldstart.finetune` import torch, so nothing is imported here.
"""

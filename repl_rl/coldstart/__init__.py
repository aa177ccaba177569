"""Cold start: a random policy, executed demonstrations of doctests and built-in tasks, supervised fine-tuning.

Only `repl_rl.coldstart.fresh` and `repl_rl.coldstart.finetune` import torch, so this module imports nothing.
"""

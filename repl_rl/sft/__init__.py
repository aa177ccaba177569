"""Cold start: a random policy, executed demonstrations of doctests and built-in tasks, supervised fine-tuning.

Only `repl_rl.sft.create_random_model` and `repl_rl.sft.finetune` import torch, so this module imports nothing.
"""

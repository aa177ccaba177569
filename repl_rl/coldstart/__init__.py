"""The cold start: a tokenizer, executed demonstrations, supervised fine-tuning, and the bundled policy made of them.

Only `repl_rl.coldstart.sft` and `repl_rl.coldstart.bundled` import torch, so nothing is imported here.
"""

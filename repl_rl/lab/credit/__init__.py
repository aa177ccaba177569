"""`repl-rl bench credit`: does credit a line learn faster than the outcome alone, at equal sampled tokens?"""

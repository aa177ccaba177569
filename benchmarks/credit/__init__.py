"""`repl-rl bench credit`: learning speed of credit per line against the outcome alone, at equal sampled tokens."""

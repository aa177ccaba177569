"""`repl-rl bench rollout`: our rollouts beside the other ways to play them, in one run, interleaved."""

"""The server of `repl-rl serve`: conversations with a policy and its console, over HTTP."""

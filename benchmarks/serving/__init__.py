"""`repl-rl serve`: a server under load, OpenAI's client, inspect_ai."""

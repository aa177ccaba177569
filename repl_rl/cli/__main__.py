"""Entry point of `python -m repl_rl.cli`, which is `repl-rl`."""

from repl_rl.cli import run

run()

"""`python -m repl_rl.cli` is `repl-rl`."""

from repl_rl.cli import run

run()

"""A Ray cluster in a separate process: `python -P -m repl_rl.machine.trial MACHINES`. It ends when its input does."""

import sys

from repl_rl.machine.own_machines import machines_here

if __name__ == "__main__":
    with machines_here("cluster", int(sys.argv[1])) as here:
        print(here.address, flush=True)
        sys.stdin.read()

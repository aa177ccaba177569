"""`python -m repl_rl.cli` is `repl-rl`."""

import sys

from repl_rl.cli import main

sys.exit(main())

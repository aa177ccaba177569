"""Start of the fork server: `fork_server_main.py ADDRESS OPTIONS`. See `fork_server`.

The kernel of a console is served from here, so that user code runs as few frames deep as under a console that started
directly. The depth at which a RecursionError comes is part of a program's output.
"""

import importlib
import json
import os
import sys
import warnings

if __name__ == "__main__":
    filters = list(warnings.filters)
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    options = json.loads(sys.argv[2])
    sys.path += [name for name in options.get("packages", ()) if name not in sys.path]
    server = importlib.import_module("repl_kernel.fork_server")
    sys.path[0] = ""
    server.run_fork_server(sys.argv[1], server.ForkServerOptions(**options), filters).run_loop()

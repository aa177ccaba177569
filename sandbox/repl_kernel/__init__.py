"""Programs that run inside a sandbox: a fork server, and per console one small supervisor and one Jupyter kernel.

They import nothing of `repl_rl`. The kernel is an ordinary one, too: `python -m repl_kernel -f CONNECTION_FILE`.
"""

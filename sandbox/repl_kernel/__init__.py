"""What runs inside a sandbox: a fork server, one small supervisor and one Jupyter kernel a console.

It imports nothing of `repl_rl`. Its kernel is an ordinary one too: `python -m repl_kernel -f CONNECTION_FILE`.
"""

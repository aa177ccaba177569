# Set-up cell of a kernel on a Jupyter server. It unpacks the relay, and starts it in a process next to the kernel.
# `_repl_ask` then sends one request to the relay, and returns the reply.


class _ReplSaid(str):
    __slots__ = ()
    __repr__ = str.__str__


def _repl_open(package, variables, options):
    import base64
    import io
    import os
    import subprocess
    import sys
    import tempfile
    import threading
    import zipfile

    folder = tempfile.mkdtemp(prefix="repl-rl-")
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(package))) as packed:
        packed.extractall(folder)
    process = subprocess.Popen(
        [sys.executable, "-B", os.path.join(folder, "repl_kernel", "jupyter_gateway_relay.py"), options, folder],
        env={**variables, "PATH": os.environ.get("PATH", os.defpath), "TMPDIR": tempfile.gettempdir()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    # A kernel that ends waits for its children, dead ones too, so reap the relay.
    threading.Thread(target=process.wait, daemon=True).start()

    def ask(question):
        process.stdin.write(question.encode() + b"\n")
        process.stdin.flush()
        while True:
            said = process.stdout.readline()
            if not said.startswith(b"?"):
                return _ReplSaid(said.decode() or '{"fault": "its relay has ended"}')
            # The relay asks back: `input` reaches the host, which answers a call of one of its functions.
            process.stdin.write(input(said[1:-1].decode()).encode() + b"\n")
            process.stdin.flush()

    return ask

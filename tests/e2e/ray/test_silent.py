"""An address at which something listens that never says a word: a cluster that hangs, a firewall, a wrong port."""

import os
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from tests.support.documents import ROOT

TRY_S = 12
"""Of which Ray waits ten in any case, and here one in place of thirty for an answer."""
PROGRAM = textwrap.dedent(
    """
    import sys
    from repl_rl.errors import ConfigError
    from repl_rl.ray.connect_cluster import connect_to_ray
    try:
        with connect_to_ray("fleet", sys.argv[1], 0, patience_s=82.0):
            print("connected")
    except ConfigError as error:
        print(error)
    """
)


@pytest.mark.heavy
def test_a_cluster_that_never_answers_is_waited_for_as_long_as_was_asked_for_and_not_without_a_word() -> None:
    with socket.create_server(("", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_py_gcs_connect_timeout_s": "1"}
        began_s = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, address], env=env, capture_output=True, text=True, timeout=200
        )
        took_s = time.monotonic() - began_s
    assert done.stdout.startswith(f"fleet is 'ray://{address}'; Ray does not answer there: "), done.stderr
    assert f"cluster {address} does not answer yet" in done.stderr
    assert TRY_S < took_s < 10 * TRY_S, "two tries, and imports; Ray by itself makes twenty"

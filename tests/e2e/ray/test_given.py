"""A cluster that somebody else started, as SLURM's script does: `ray start`, and `repl-rl train` beside its head."""

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_docs_commands import SMALL
from tests.support.documents import ROOT, blocks
from tests.support.processes import wait_for
from tests.support.sandbox.jupyter_servers import free_port

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
RAY = (sys.executable, "-m", "ray.scripts.scripts")
STARTS = 4


@dataclass(frozen=True, slots=True)
class Given:
    """A cluster of two machines that are this one."""

    address: str
    env: Mapping[str, str]
    """Of who may come in."""
    head: subprocess.Popen[bytes]


@contextmanager
def started(words: Sequence[str], env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """`ray start`, and its end with all that it has started."""
    process = subprocess.Popen(
        [*RAY, "start", *words, "--num-cpus=1", "--object-store-memory=100000000", "--block", "--disable-usage-stats"],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        family = [] if process.poll() is not None else psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert psutil.wait_procs(family, timeout=60)[1] == []


def there(sessions: Path, head: subprocess.Popen[bytes]) -> bool:
    """Whether a head has come up, once that is known. Ray gives its own agents 15 s, which a busy machine misses."""

    def agents() -> bool:
        newest = max(sessions.glob("session_2*"), default=None)
        names = ("metrics_agent_port_*", "runtime_env_agent_port_*")
        return newest is not None and all(any(newest.glob(name)) for name in names)

    wait_for(lambda: head.poll() is not None or agents(), None, 120)
    return head.poll() is None


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Given]:
    """It may not have come up yet: nor does the script wait for it."""
    with ExitStack() as stack:
        short = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))  # room for the names of Ray's sockets
        token = tmp_path_factory.mktemp("token") / "auth_token"
        token.write_text(secrets.token_hex(32))
        env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "PYTHONPATH": str(ROOT)}
        address = f"127.0.0.1:{free_port()}"
        port = address.rpartition(":")[2]
        words = [
            "--head",
            f"--port={port}",
            "--node-ip-address=127.0.0.1",
            f"--temp-dir={short}",
            "--include-dashboard=0",
        ]
        head = stack.enter_context(started(words, env))
        for _ in range(STARTS - 1):
            if there(Path(short), head):
                break
            head = stack.enter_context(started(words, env))
        stack.enter_context(started([f"--address={address}", "--node-ip-address=127.0.0.1"], env))
        yield Given(address, env, head)


def train(given: Given, env: Mapping[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """The run of the script, in small."""
    (run,) = re.findall(r"repl-rl (train .*)", blocks("bash", "docs/scaling.md")[0])
    words = [word.replace("$head:6379", given.address) for word in shlex.split(run)]
    argv = [sys.executable, "-m", "repl_rl.cli", *words, *shlex.split(SMALL["train"].replace("--overwrite", ""))]
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=400)


def test_the_run_of_the_script_trains_on_all_machines_and_leaves_the_cluster_as_it_was(
    given: Given, tmp_path: Path
) -> None:
    done = train(given, given.env, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads((tmp_path / "runs" / "wide" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 1)
    assert summary["fleet"]["cluster"] == f"ray://{given.address}"
    assert summary["fleet"]["lost"] == []
    assert "asks nobody for a token" not in done.stderr
    assert given.head.poll() is None
    actors = [one for one in psutil.Process().children(recursive=True) if "RolloutWorker" in " ".join(_words(one))]
    wait_for(lambda: not any(one.is_running() for one in actors), None, 60)


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@pytest.mark.parametrize("why", ["no token", "another token"])
def test_who_does_not_know_its_token_is_refused_with_one_line(why: str, given: Given, tmp_path: Path) -> None:
    own = {"RAY_AUTH_TOKEN_PATH": "", "RAY_AUTH_TOKEN": secrets.token_hex(32)} if why == "another token" else {}
    without = {name: value for name, value in given.env.items() if not name.startswith("RAY_AUTH")}
    env = {**(given.env if own else without), **own}
    done = train(given, env, tmp_path)
    assert done.returncode == 2, done.stderr[-4000:]
    assert f"workers is 'ray://{given.address}'" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr

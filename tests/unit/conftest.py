"""Unit tests start no process and open no connection: an attempt fails the test."""

import sys
from types import FrameType

import pytest

_PROCESS = ("subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
_NETWORK = ("socket.bind", "socket.connect", "socket.getaddrinfo", "socket.gethostbyname")
_FORBIDDEN = {**dict.fromkeys(_PROCESS, "a process"), **dict.fromkeys(_NETWORK, "the network")}
"""Audit events of Python, and what each of them needs."""


class _Guard:
    """Audit hook, which Python keeps for good; it is on during unit tests alone."""

    on = False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.on and event in _FORBIDDEN and not _is_importing():
            self.on = False  # a report of the failure may need one
            pytest.fail(f"a unit test needs {_FORBIDDEN[event]} ({event}); move it to tests/integration or tests/e2e")


def _is_importing() -> bool:
    """Return whether a module is being imported: urllib3 binds a socket then, to see if there is IPv6."""
    frame: FrameType | None = sys._getframe()
    while frame and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


_guard = _Guard()
sys.addaudithook(_guard)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin before the fixtures of a test; pytest calls this for tests below this folder only."""
    _guard.on = True


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """End after them."""
    _guard.on = False

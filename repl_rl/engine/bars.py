"""Progress bars in vLLM's process; a file of its own, so that its test runs where vLLM is not installed."""

import importlib
import threading


def without_semaphores() -> None:
    """Give tqdm's bars a lock of this process alone; to be called before the first bar.

    Its own is a named semaphore as well, which the host's resource tracker says is leaked where this process ends
    without taking itself apart. Bars of one process need none.
    """
    importlib.import_module("tqdm.std").tqdm.set_lock(threading.RLock())

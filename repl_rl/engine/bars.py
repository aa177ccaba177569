"""Progress bars in vLLM's process. This is a separate file, so its test runs without vLLM."""

import importlib
import threading


def without_semaphores() -> None:
    """Give tqdm's bars a lock that only this process uses. Call it before the first bar.

    tqdm's default lock includes a named semaphore. The host's resource tracker reports it as leaked if this process
    exits without cleanup. Bars of one process do not need it.
    """
    importlib.import_module("tqdm.std").tqdm.set_lock(threading.RLock())

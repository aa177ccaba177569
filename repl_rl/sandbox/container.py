"""A fork server's container, from when it runs to when it is removed."""

import asyncio
import contextlib

from repl_rl.sandbox.daemon import Container

_REMOVED_WITHIN_S = 30


class RunningContainer:
    """A fork server's container."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._words = ""
        self._alive = True

    @property
    def alive(self) -> bool:
        """False once it has been seen ended."""
        return self._alive

    def look(self) -> bool:
        """Ask the daemon whether it runs, and keep the end of its log."""
        import docker  # slow to import

        try:
            self._words = self._container.logs(tail=20).decode("utf-8", "replace").strip()
            self._container.reload()
            self._alive = self._container.status in ("created", "running")
        except (docker.errors.APIError, OSError):  # removed, or the daemon is away
            self._alive = False
        return self._alive

    def last_words(self) -> str:
        """The end of its log, when it was last looked at."""
        return self._words or "it said nothing"

    async def end(self) -> None:
        """Kill and remove it."""
        await asyncio.to_thread(self._remove)
        self._alive = False

    def _remove(self) -> None:
        import docker  # slow to import

        try:
            self._container.remove(force=True)
        except docker.errors.NotFound:
            pass
        except docker.errors.APIError as error:
            if "already in progress" not in str(error):
                raise
            with contextlib.suppress(docker.errors.NotFound):
                self._container.wait(condition="removed", timeout=_REMOVED_WITHIN_S)
        except OSError:  # the daemon is away; our end of the line is closed, so it ends, and is removed, by itself
            pass

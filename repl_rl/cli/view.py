"""`repl-rl view RUN`: open the report of a run, or follow one that is running."""

import html
import tempfile
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from repl_rl.errors import ConfigError
from repl_rl.runs.report import ReportServer, write_report
from repl_rl.settings.argument_parser import parse


@dataclass(frozen=True)
class ViewConfig:
    """Write RUN/report.html again, print its address, and open it in a browser."""

    run: Positional[Path]
    """Run folder, such as runs/quickstart."""
    serve: bool = False
    """Follow a training in progress: serve the report on the loopback interface until interrupted."""
    port: int = 0
    """Port to serve on, 0 to 65535. 0 means any free port."""
    open: bool = True
    """Open a browser. The address is printed in any case."""

    def __post_init__(self) -> None:
        if self.port and not self.serve:
            raise ConfigError("port", self.port, "it has no effect without --serve; leave it out")
        if not 0 <= self.port < 65536:
            raise ConfigError("port", self.port, "give 0 to 65535")


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    config = parse(ViewConfig, "view", argv)
    if config.serve:
        _serve_report(config)
        return 0
    address = write_report(config.run).resolve().as_uri()
    print(address, flush=True)
    if config.open:
        webbrowser.open(address)
    return 0


def _serve_report(config: ViewConfig) -> None:
    try:
        server = ReportServer(config.run, config.port)
    except OSError as error:
        raise ConfigError("port", config.port, f"it cannot be opened: {error.strerror}; give another") from error
    with server, _open_redirect_page(server.address) as doorway:
        # `webbrowser.open` waits for a text browser, so the server answers in another thread.
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        print(f"{server.address}    (interrupt to stop)", flush=True)
        try:
            if config.open:
                webbrowser.open(doorway.as_uri())
            serving.join()
        finally:
            server.shutdown()


@contextmanager
def _open_redirect_page(address: str) -> Iterator[Path]:
    """Yield a page, readable only by this user, that redirects to `address`.

    Every user of the machine can read the browser's command line, and the address has the token.
    """
    # The folder has mode 0700.
    with tempfile.TemporaryDirectory(prefix="repl-rl-view-") as folder:
        page = Path(folder, "report.html")
        page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(address)}">\n')
        yield page

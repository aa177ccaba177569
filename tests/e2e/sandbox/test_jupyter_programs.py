"""Programs that people use with Jupyter kernels: `jupyter console` in a terminal, and nbclient."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pexpect
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from repl_rl.sandbox import jupyter_kernelspec as jupyter
from tests.support.sandbox.kernel_client import TIMEOUT_S, installed

ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[()][A-Z0-9]|[=>])")
AT_ONCE = 5
"""Characters that are read at once: so few that escapes are cut in the middle, as on a busy machine now and then."""


@pytest.fixture(autouse=True, params=[False, True], ids=["plain", "isolated"])
def kernelspec(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    with installed(tmp_path, isolated=request.param):
        yield


class Terminal:
    """`jupyter console` in a pseudo-terminal, as a person sees it: without colours and cursor moves."""

    def __init__(self, process: "pexpect.spawn[str]") -> None:
        self._process = process
        self._unseen = ""

    def wait_for(self, words: str) -> str:
        """Read on until `words` are there; returns what was shown up to their end."""
        while words not in (shown := ESCAPES.sub("", self._unseen)):
            try:
                self._unseen += self._process.read_nonblocking(AT_ONCE, timeout=TIMEOUT_S)
            except pexpect.TIMEOUT as error:
                raise pexpect.TIMEOUT(f"no {words!r} within {TIMEOUT_S:.0f} s, but {shown!r}") from error
        before, found, self._unseen = shown.partition(words)
        return before + found

    def type(self, keys: str) -> None:
        self._process.send(keys)


def deaf_to_ctrl_c(home: Path) -> bool:
    """A whole session of `jupyter console`; whether it hung at Ctrl-C, which it shows by showing nothing more."""
    environment = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "HOME": str(home)}
    program = str(Path(sys.executable).with_name("jupyter-console"))
    # After a second without an answer it would take each further line for the first of several.
    patient = f"--ZMQTerminalInteractiveShell.kernel_is_complete_timeout={TIMEOUT_S}"
    process = pexpect.spawn(
        program, ["--kernel", jupyter.NAME, patient], env=environment, encoding="utf-8", dimensions=(40, 120)
    )
    try:
        terminal = Terminal(process)
        terminal.wait_for("In [1]: ")
        terminal.type("6 * 7\r")
        terminal.wait_for("Out[1]: 42")
        terminal.wait_for("In [2]: ")
        terminal.type("1 / 0\r")
        terminal.wait_for("ZeroDivisionError: division by zero")
        terminal.wait_for("In [3]: ")
        terminal.type("isinst\t")
        terminal.wait_for("isinstance")
        terminal.type("(1, int)\r")
        terminal.wait_for("Out[3]: True")
        terminal.wait_for("In [4]: ")
        terminal.type("print('beg' + 'un'); import time; time.sleep(1000)\r")
        terminal.wait_for("begun")
        terminal.type("\x03")
        try:
            terminal.wait_for("KeyboardInterrupt")
        except pexpect.TIMEOUT:
            return True
        terminal.wait_for("In [5]: ")
        terminal.type("exit()\r")
        process.expect(pexpect.EOF, timeout=TIMEOUT_S)
        assert process.wait() == 0
        return False
    finally:
        process.close(force=True)


def test_jupyter_console_shows_results_and_errors_completes_interrupts_and_leaves(tmp_path: Path) -> None:
    # The console's handler of Ctrl-C calls jupyter_core's `run_sync`, which takes a lock that the code it interrupts
    # may hold: about one signal in a thousand hangs it, with any kernel. Two of two are a kernel's fault.
    assert not (deaf_to_ctrl_c(tmp_path) and deaf_to_ctrl_c(tmp_path))


def notebook(*sources: str) -> nbformat.NotebookNode:
    cells: nbformat.NotebookNode = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in sources]
    )
    return cells


def test_nbclient_keeps_every_kind_of_output_and_stops_at_an_error(tmp_path: Path) -> None:
    shown = "import sys\nfrom IPython.display import HTML, clear_output, display\n"
    cells = notebook(
        f"{shown}print('out')\nprint('err', file=sys.stderr)\ndisplay(HTML('<b>b</b>'))\n6 * 7",
        "print('gone')\nclear_output()\nprint('stays')",
        "raise ValueError('no')",
        "print('never')",
    )
    client = NotebookClient(cells, kernel_name=jupyter.NAME, timeout=int(TIMEOUT_S))
    with pytest.raises(CellExecutionError, match="ValueError: no"):
        client.execute()
    first, second, third, fourth = (cell.outputs for cell in cells.cells)
    assert sorted(output.output_type for output in first) == ["display_data", "execute_result", "stream", "stream"]
    assert {o.name: o.text for o in first if o.output_type == "stream"} == {"stdout": "out\n", "stderr": "err\n"}
    assert first[-1].data == {"text/plain": "42"}
    assert [output.text for output in second] == ["stays\n"]
    assert [(output.output_type, output.ename) for output in third] == [("error", "ValueError")]
    assert fourth == []
    assert [cell.execution_count for cell in cells.cells] == [1, 2, 3, None]
    nbformat.validate(cells)

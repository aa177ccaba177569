"""Installing the Jupyter kernel replaces an older installation of it, and no file of another program."""

import json
from pathlib import Path

import pytest

from repl_rl.errors import ConfigError
from repl_rl.sandbox.jupyter_kernelspec import NAME, install_kernelspec

OTHERS = ("{", "[]", "null", '{"argv": 3}', '{"argv": ["ir", "-f", "{connection_file}"]}', "\x00")


def test_an_older_kernelspec_of_ours_is_replaced(tmp_path: Path) -> None:
    folder = install_kernelspec(tmp_path, isolated=False)
    assert folder == tmp_path / "kernels" / NAME
    before = json.loads((folder / "kernel.json").read_text())
    (folder / "kernel.json").write_text(json.dumps({**before, "display_name": "older"}))
    install_kernelspec(tmp_path, isolated=False)
    assert json.loads((folder / "kernel.json").read_text()) == before


@pytest.mark.parametrize("text", OTHERS)
def test_a_file_that_is_no_kernelspec_of_ours_is_left_as_it_is(text: str, tmp_path: Path) -> None:
    file = tmp_path / "kernels" / NAME / "kernel.json"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(ConfigError, match="file of the kernelspec"):
        install_kernelspec(tmp_path, isolated=False)
    assert file.read_text() == text

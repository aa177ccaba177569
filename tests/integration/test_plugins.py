"""Code of the user in a program of its own."""

import subprocess
import sys
from pathlib import Path


def test_a_program_finds_modules_in_the_folder_that_one_works_in_and_hides_none_by_them(tmp_path: Path) -> None:
    (tmp_path / "their_local_module.py").write_text("here = True\n")
    (tmp_path / "colorsys.py").write_text("1/0\n")
    code = "from repl_rl.settings.component_registry import import_attribute; import colorsys"
    code += "; assert import_attribute('thing', 'their_local_module:here')"
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, check=True)

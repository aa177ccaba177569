"""Old names, as type checkers see them."""

import shutil
import subprocess
import sys
from pathlib import Path

from repl_rl import deprecations

CHECKED = """
from dataclasses import dataclass

from repl_rl import aged
from repl_rl.deprecations import deprecated_keywords, deprecated_members


@deprecated_keywords(cut="truncated")
@deprecated_members(cut="truncated")
@dataclass(frozen=True, slots=True)
class Observed:
    truncated: bool


@deprecated_keywords(tell="warn")
def save(warn: str) -> int:
    return len(warn)


new: bool = Observed(truncated=True).truncated
length: int = save(warn="a") + aged.new
Observed(cut=True)
Observed(True).cut
save(tell="a")
aged.old
"""


def test_type_checkers_see_the_new_names_only(tmp_path: Path) -> None:
    package = tmp_path / "repl_rl"
    package.mkdir()
    (package / "__init__.py").touch()
    # Alone: the checker need not read the rest of the package.
    ours = Path(deprecations.__file__).parent
    shutil.copytree(ours, package / "deprecations")
    shutil.copy(ours.parent / "errors.py", package)
    (package / "aged.py").write_text(
        "from repl_rl.deprecations import module_getattr\n"
        "new = 1\n"
        "globals()['__getattr__'] = module_getattr(__name__, {'old': 'new'})\n"
    )
    (tmp_path / "mine.py").write_text(CHECKED)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", "cache", "mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    wrong = [line.split(" error: ")[1] for line in done.stdout.splitlines() if " error: " in line]
    assert wrong == [
        'Unexpected keyword argument "cut" for "Observed"  [call-arg]',
        '"Observed" has no attribute "cut"  [attr-defined]',
        'Unexpected keyword argument "tell" for "save"  [call-arg]',
        'Module has no attribute "old"  [attr-defined]',
    ], done.stdout + done.stderr

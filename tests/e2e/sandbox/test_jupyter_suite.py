"""PyPI's `jupyter_kernel_test`, every case of it, against the installed kernelspec."""

from collections.abc import Iterator

import jupyter_kernel_test
import pytest

from repl_rl.sandbox import jupyter_kernelspec as jupyter
from tests.support.sandbox.kernel_client import installed


@pytest.fixture(scope="module", autouse=True)
def kernelspec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed(tmp_path_factory.mktemp("jupyter"), isolated=False):
        yield


PICTURE = "b'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII='"
DISPLAY = "from base64 import b64decode; from IPython.display import HTML, Image, display; "


class TestTheProtocol(jupyter_kernel_test.KernelTests):
    kernel_name = jupyter.NAME
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('oops', file=sys.stderr)"
    completion_samples = (
        {"text": "zi", "matches": {"zip"}},
        {"text": "import colle", "matches": {"collections"}},
        {"text": "''.__le", "matches": set()},
        {"text": "str.isal", "matches": {"isalnum", "isalpha"}},
    )
    complete_code_samples = ("1", "print('hello, world')", "def f(x):\n  return x*2\n\n", "x = 1\ny = 2", "# nothing")
    incomplete_code_samples = ("print('''hello", "def f(x):\n  x*2", "for i in range(3):", "x = 1\nif x:\n    pass")
    invalid_code_samples = ("import = 7q", "!ls", "%time 1", "x?", "1 +* 2")
    code_page_something = "help(len)"
    code_generate_error = "raise ValueError('no')"
    code_execute_result = (
        {"code": "6 * 7", "result": "42"},
        {"code": "'abc'", "result": "'abc'"},
        {"code": "x = 20\nx + 1", "result": "21"},
        {"code": "from IPython.display import HTML\nHTML('<b>b</b>')", "mime": "text/html", "result": "<b>b</b>"},
    )
    code_display_data = (
        {"code": f"{DISPLAY}display(HTML('<b>b</b>'))", "mime": "text/html"},
        {"code": f"{DISPLAY}display(Image(b64decode({PICTURE})))", "mime": "image/png"},
    )
    code_history_pattern = "6 * [0-9]"
    supported_history_operations = ("tail", "range", "search")
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"


class TestTheWelcome(jupyter_kernel_test.IopubWelcomeTests):
    kernel_name = jupyter.NAME
    support_iopub_welcome = True

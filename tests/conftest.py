"""Settings, options and fixtures of all tests."""

import gc
import importlib.metadata
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import settings
from transformers import PreTrainedTokenizerFast

from repl_rl.utils.import_trl import skip_vllm_in_trl
from tests.support.tokenizers import TOKENIZERS

# The program does the same: vLLM and what it needs are half of what importing TRL takes.
skip_vllm_in_trl()
pytest.register_assert_rewrite("tests.support.samplers.marked_text")  # its assertions explain themselves

_OF_A_USER = (
    "CLICOLOR", "COLUMNS", "FORCE_COLOR", "HF_", "IPYTHON", "JUPYTER_", "LINES", "MPL", "NO_COLOR", "OPENAI_",
    "PYTHONSTARTUP", "PYTHONWARNINGS", "RAY_", "REPL_RL_", "TRACKIO_", "TRANSFORMERS_", "TTY_", "VLLM_", "WANDB_",
)  # fmt: skip
"""Variables, by how they begin, with which a user sets up other programs, or this one. No result depends on them."""
for _name in [name for name in os.environ if name.startswith(_OF_A_USER)]:
    del os.environ[_name]

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

# A shell in the background has Ctrl-C ignored, nohup has SIGHUP ignored, and the programs of tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="K/N", help="run the K-th (0 to N - 1) of N parts of the files")


def pytest_configure(config: pytest.Config) -> None:
    """Accept unused snapshots: one is of another kind of processor. `test_snapshots` finds stale ones."""
    config.option.warn_unused_snapshots = True


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep the garbage collector away from the imported modules.

    Torch and its companions are millions of objects, so each `gc.collect()` takes a second. Trainings call it.
    """
    gc.collect()
    gc.freeze()


class _Unfreeze:
    """`gc.unfreeze` that remembers its calls. `gc.get_freeze_count` counts millions of objects, a tenth of a second."""

    called = False
    original = staticmethod(gc.unfreeze)

    def __call__(self) -> None:
        self.called = True
        self.original()


_unfreeze = _Unfreeze()
gc.unfreeze = _unfreeze


def pytest_runtest_setup() -> None:
    """Freeze again where code that ends its own freeze has ended this one, too."""
    if _unfreeze.called:
        _unfreeze.called = False
        gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter end as usual: extension modules complain about objects that it does not free."""
    gc.unfreeze()


def _shard(config: pytest.Config) -> tuple[int, int] | None:
    """Return K and N of `--shard K/N`."""
    if not (wanted := config.getoption("--shard")):
        return None
    part, parts = map(int, wanted.split("/"))
    if not 0 <= part < parts:
        raise pytest.UsageError(f"--shard {wanted}: K is 0 to N - 1")
    return part, parts


def _is_shared(file: Path) -> bool:
    """Return whether the rows of a file's table, not the file, belong to the parts."""
    return file.name == "test_pairs.py"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of another part: importing all of them takes a minute."""
    if (shard := _shard(config)) is None or collection_path.suffix != ".py" or _is_shared(collection_path):
        return None
    name = os.path.relpath(collection_path, config.rootpath)
    return crc32(name.encode()) % shard[1] != shard[0] or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one part: of files, by their names, and of the rows of the table of pairs, by their numbers."""
    if (shard := _shard(config)) is None:
        return
    part, parts = shard

    def place(item: pytest.Item) -> int:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        row = parameters.get("row") if _is_shared(item.path) else None
        return row if isinstance(row, int) else crc32(item.nodeid.partition("::")[0].encode())

    left_out = [item for item in items if place(item) % parts != part]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if place(item) % parts == part]


# Machines are noisy: a slow example is no failure.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session", autouse=True)
def parse_metadata_once() -> Iterator[None]:
    """Accelerate parses the metadata of PEFT several times in each step: a sixth of the time of a small training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "metadata", cache(importlib.metadata.metadata))
        yield


@pytest.fixture(scope="session", params=sorted(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"

"""What every test can use: tiny tokenizers of different newline habits, made here."""

import os
import signal
from collections.abc import Callable
from zlib import crc32

import pytest
from hypothesis import settings
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one part: of files, by their names, and of the rows of the table of pairs, by their numbers."""
    if not (wanted := config.getoption("--shard")):
        return
    part, parts = map(int, wanted.split("/"))
    if not 0 <= part < parts:
        raise pytest.UsageError(f"--shard {wanted}: K is 0 to N - 1")

    def place(item: pytest.Item) -> int:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        row = parameters.get("row")
        return row if isinstance(row, int) else crc32(item.nodeid.partition("::")[0].encode())

    left_out = [item for item in items if place(item) % parts != part]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if place(item) % parts == part]


# Machines are noisy: a slow example is no failure.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


_CORPUS = [
    "for i in range(10):\n    print(i)\n\nsubmit_final_answer(3)\n>>> x = 1\n160\n>>> ",
    "if x:\n    y\n\ndef f(x):\n    return x\n\nf(3)\nx = [1, 2]\nlen('abc')\n",
] * 20


def merged_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose tokens merge text before a newline and several newlines (`)\\n`, `\\n\\n`)."""
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(r"[^\s\w]+\n*|\s*\n+|\w+| "), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, bytes_])
    return _byte_level(tokenizer, 400)


def overshooting_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that merges across newlines, so tokens have text after their newline."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _byte_level(tokenizer, 500)


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Metaspace pieces with byte fallback: a newline is `<0x0A>`, and a first word carries a space."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    text = [line.replace("\n", " ") for line in _CORPUS]
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=450, special_tokens=special))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<s>", unk_token="<unk>", name_or_path="sentencepiece"
    )


def _byte_level(tokenizer: Tokenizer, size: int) -> PreTrainedTokenizerFast:
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_end|>", "<|pad|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>", name_or_path="byte-level"
    )


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "merged": merged_tokenizer,
    "overshooting": overshooting_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
}


@pytest.fixture(scope="session", params=sorted(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"

"""GGUF files, dequantized once into a folder like that of any other model.

The folder's name has a stamp of the file (`compute_stamp`), so that a conversion runs again only if its input changes.
"""

import hashlib
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.models.describe_load_error import describe_load_error
from repl_rl.models.validate_weights import ClaimError, build_skeleton, validate_layer_count
from repl_rl.utils.atomic_files import replace_folder_atomically

_MAGIC = b"GGUF"
"""First bytes of every GGUF file."""
_END_OF_TURN = "tokenizer.ggml.eot_token_id"
"""Key of the token that ends a turn of a chat."""


def convert_gguf(file: Path, cache_folder: Path, log: Callable[[str], None]) -> Path:
    """Convert the model in `file` to a folder in `cache_folder`: float32 weights, config, tokenizer with chat template.

    The end tokens are those of the file. The conversion runs once; the folder's name has a stamp of the file.

    Raises:
        ConfigError: it is not a GGUF file, is truncated, or has an architecture that transformers cannot read. Or its
            config describes more layers or weights than the file holds.
    """
    try:
        with file.open("rb") as stream:
            magic = stream.read(len(_MAGIC))
    except OSError as error:
        raise ConfigError("model file", str(file), f"it cannot be read: {error.strerror}") from error
    if magic != _MAGIC:
        remedy = "it is not a GGUF file; give a folder with weights, config and tokenizer, a .gguf file, or owner/name"
        raise ConfigError("model file", str(file), remedy)
    folder = cache_folder / f"{file.stem}-{compute_stamp(file)}"
    if not folder.is_dir():
        log(f"dequantising {file} into {folder} ...")
        with _limit_progress_bars():
            _write_converted_model(file, folder)
    return folder


def compute_stamp(*files: Path) -> str:
    """Return 12 hex digits that change with every write of a file.

    They come from name, size and time, not from the content.
    """
    properties = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(properties).encode()).hexdigest()[:12]


def _write_converted_model(file: Path, folder: Path) -> None:
    # Import here, because it takes seconds and a conversion happens once.
    import torch
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.integrations.gguf import read_gguf_metadata

    # A link, as in the hub's cache, may have another name than its target.
    resolved = file.resolve()
    parent, name = str(resolved.parent), resolved.name
    try:
        metadata, tensors = read_gguf_metadata(str(file))
        validate_layer_count(metadata, len(tensors))
        # Fails early for an unknown architecture.
        config = AutoConfig.from_pretrained(parent, gguf_file=name, trust_remote_code=False)
        head_dim = metadata.get(f"{metadata['general.architecture']}.attention.key_length")
        if head_dim is not None and hasattr(config, "head_dim"):
            # transformers leaves it at the default of the architecture.
            config.head_dim = head_dim
        # No format of GGUF has more than 8 values in a byte; several tensors may name the same bytes.
        value_count = min(sum(int(tensor.n_elements) for tensor in GGUFReader(file).tensors), 8 * file.stat().st_size)
        skeleton = build_skeleton(config, value_count)
        tokenizer = AutoTokenizer.from_pretrained(parent, gguf_file=name, trust_remote_code=False)
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            parent,
            gguf_file=name,
            config=config,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            trust_remote_code=False,
        )
    except ClaimError as error:
        raise ConfigError("GGUF file", str(file), f"{error}; get another") from error
    # A parser may raise anything for foreign bytes.
    except Exception as error:
        reason = describe_load_error(error)
        remedy = f"transformers cannot read it: {reason}; get the file again, or give a folder with safetensors"
        raise ConfigError("GGUF file", str(file), remedy) from error
    # transformers initializes missing weights at random, so compare all shapes with those of the config.
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    expected = {name: weight.shape for name, weight in skeleton.state_dict().items()}
    mismatched = sorted(
        {*loading_info["missing_keys"], *(name for name in expected if shapes.get(name) != expected[name])}
    )
    if mismatched:
        remedy = (
            f"weights are missing or of another shape than it says: {mismatched[0]}, "
            f"{len(mismatched)} in all; get another"
        )
        raise ConfigError("GGUF file", str(file), remedy)
    # End the turn as well as the text: chat models stop at either token.
    end_ids = {tokenizer.eos_token_id, model.generation_config.eos_token_id, metadata.get(_END_OF_TURN)} - {None}
    model.generation_config.eos_token_id = sorted(end_ids) if len(end_ids) > 1 else end_ids.pop()
    with replace_folder_atomically(folder) as target:
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


@contextmanager
def _limit_progress_bars() -> Iterator[None]:
    """Disable progress bars if stderr is not a terminal, because they would fill a log file."""
    # Import here, because it takes seconds and a conversion happens once.
    from transformers.utils import logging

    disabled = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if disabled:
        logging.disable_progress_bar()
    try:
        # tqdm's bar of the tensors has no switch, so its output is dropped. Logs keep their stream.
        with redirect_stderr(io.StringIO()) if disabled else nullcontext():
            yield
    finally:
        if disabled:
            logging.enable_progress_bar()

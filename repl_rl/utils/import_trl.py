"""Import of TRL without vLLM.

TRL imports vLLM for its built-in generation, which this package does not use. That takes about as long as the import of
torch and transformers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_skipped = False


def skip_vllm_in_trl() -> None:
    """Import TRL without vLLM from now on in this process.

    For programs. A notebook may use TRL's own generation on vLLM too, so importing this package must not disable it.
    """
    global _skipped
    _skipped = True


@contextmanager
def importing_trl() -> Iterator[None]:
    """Import TRL within this block. After `skip_vllm_in_trl`, TRL does not find vLLM here."""
    if not _skipped:
        yield
        return
    # TRL is imported only where it is used.
    from trl import import_utils

    find = import_utils._is_package_available

    def find_others(name: str, return_version: bool = False) -> tuple[bool, str] | bool:
        if name == "vllm":
            return (False, "N/A") if return_version else False
        result: tuple[bool, str] | bool = find(name, return_version=return_version)
        return result

    import_utils._is_package_available = find_others
    try:
        yield
    finally:
        import_utils._is_package_available = find

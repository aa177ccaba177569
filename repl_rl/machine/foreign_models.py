"""Model folders of other people: why transformers cannot load one, in one line."""

_MAX_REASON_CHARS = 300


def load_error(error: BaseException) -> str:
    """Return one line with the reason why transformers cannot load a folder."""
    if "trust_remote_code" in str(error):
        # transformers advises to run the folder's code, which no command does.
        return "it needs its own code (auto_map), which is never run; use a model of a family that transformers has"
    return " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__

"""Models of the Hugging Face hub, downloaded with its own client, which has cache, token and progress bars."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from repl_rl.errors import ConfigError

_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_RESPONSE_TIMEOUT_S = 10.0
"""Timeout of the hub's first response, seconds."""
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_UNWANTED = ["*/*", "consolidated*", "training_args*"]
"""Patterns of copies of the same weights in other layouts, mostly in subfolders."""
_REQUIRED_FILES = ("config.json", "adapter_config.json"), ("*.safetensors",)
"""Patterns of files that a model's folder needs: one pattern of each group."""


@dataclass(frozen=True, slots=True)
class HubName:
    """Name of a model on the hub, `owner/name`, and its revision."""

    name: str
    revision: str | None = None
    """Branch, tag or commit; None means the default branch."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse `owner/name` or `owner/name@revision`; return None for any other text."""
        match = _NAME.fullmatch(text)
        return cls(match["name"], match["revision"]) if match and not text.endswith(".gguf") else None

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name


@dataclass(frozen=True, slots=True)
class CachedModel:
    """Model in the hub's cache."""

    folder: Path
    hub_name: HubName
    """Name with its commit."""
    fallback_reason: str | None = None
    """Reason why a possibly outdated copy is used. None means that the hub responded, or that a commit was named."""


def download_model(name: HubName, log: Callable[[str], None]) -> CachedModel:
    """Return the model in the hub's cache, and download missing files.

    A commit that is completely cached needs no request. If the hub does not respond, the cached copy of a branch or tag
    is used, and the callback gets a line about it.

    Raises:
        ConfigError: the model or revision does not exist, it may not be read, or it is not cached and the hub does not
            respond.
    """
    # A commit never changes, so a complete copy needs no request.
    if name.revision and _COMMIT.fullmatch(name.revision) and (folder := _find_cached(name)):
        return CachedModel(folder, name)
    unreachable = _check_availability(name)
    if unreachable is None:
        log(f"getting {name} from the hub ...")
        folder, fallback = _fetch_snapshot(name), None
    elif (cached := _find_cached(name)) is not None:
        folder = cached
        fallback = f"the hub cannot be reached ({unreachable}); using the cached {name}, commit {folder.name}"
        log(fallback)
    else:
        raise _make_missing_error(name, unreachable)
    return CachedModel(folder, replace(name, revision=folder.name), fallback)


def find_hub_name(folder: Path) -> HubName | None:
    """Return the hub's name and commit of a snapshot folder in its cache, or None for any other folder."""
    owner_and_name = folder.parent.parent.name.split("--")
    if folder.parent.name != "snapshots" or owner_and_name[0] != "models" or not _COMMIT.fullmatch(folder.name):
        return None
    return HubName("/".join(owner_and_name[1:]), folder.name)


def _check_availability(name: HubName) -> str | None:
    """Request the model from the hub. Return the reason if the hub does not respond, or None if it has the model.

    Raises:
        ConfigError: the hub does not have it, or refuses access.
    """
    # Import here and below, because it takes half a second and only hub models need it.
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        HfApi().model_info(name.name, revision=name.revision, timeout=_RESPONSE_TIMEOUT_S)
    # Subclasses first: a gated model is also a missing one, and both are HTTP errors.
    except RevisionNotFoundError as error:
        raise ConfigError(
            f"revision of {name.name}", name.revision, "the hub has no such revision; give a branch, tag or commit"
        ) from error
    except GatedRepoError as error:
        raise _make_gated_error(name) from error
    except RepositoryNotFoundError as error:
        remedy = (
            f"no such folder is here, and {_get_endpoint()} has no such model or hides it; `hf auth login` shows yours"
        )
        raise ConfigError("model", str(name), remedy) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            remedy = "the hub refuses your token; `hf auth login` gets a new one, or unset HF_TOKEN"
            raise ConfigError("model", str(name), remedy) from error
        return f"{_get_endpoint()} answers {status}"
    # The HTTP library's errors, which differ between versions of the client.
    except Exception as error:
        return f"{_get_endpoint()}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return None


def _fetch_snapshot(name: HubName) -> Path:
    # Slow to import.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError

    try:
        snapshot = snapshot_download(
            name.name, revision=name.revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    except GatedRepoError as error:
        raise _make_gated_error(name) from error
    # Errors of the HTTP library as above, and a full disk.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        remedy = f"its download stopped: {reason}; what is complete is kept in {_get_cache_folder()}, so try again"
        raise ConfigError("model", str(name), remedy) from error
    folder = Path(snapshot)
    if (missing := _find_missing_file(folder)) is not None:
        remedy = f"it has no {missing} at its top; name a model with safetensors weights"
        if missing == "*.safetensors":
            remedy += f", or get a .gguf file of it (`hf download {name.name} FILE.gguf`) and give that"
        raise ConfigError("model", str(name), remedy)
    return folder


def _find_cached(name: HubName) -> Path | None:
    """Return its folder in the cache if all files are there."""
    # Slow to import.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot = snapshot_download(
            name.name,
            revision=name.revision,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        return None
    return None if _find_missing_file(Path(snapshot)) else Path(snapshot)


def _find_missing_file(folder: Path) -> str | None:
    """Return the first file pattern that a model's folder needs and this one lacks."""
    for patterns in _REQUIRED_FILES:
        if not any(True for pattern in patterns for _ in folder.glob(pattern)):
            return patterns[0]
    return None


def _make_missing_error(name: HubName, reason: str) -> ConfigError:
    commits = sorted((Path(_get_cache_folder()) / f"models--{name.name.replace('/', '--')}" / "snapshots").glob("*"))
    cached = f"only {', '.join(c.name for c in commits)}, or parts of it" if commits else "nothing of it"
    download = f"hf download {name.name}" + (f" --revision {name.revision}" if name.revision else "")
    remedy = (
        f"there is no such folder, the cache {_get_cache_folder()} has {cached}, and the hub cannot be reached "
        f"({reason}); run `{download}` on a machine that reaches it, and copy its cache here (folder HF_HOME)"
    )
    return ConfigError("model", str(name), remedy)


def _make_gated_error(name: HubName) -> ConfigError:
    remedy = f"accept its conditions at {_get_endpoint()}/{name.name}, then `hf auth login`, or set HF_TOKEN"
    return ConfigError("gated model", str(name), remedy)


def _get_endpoint() -> str:
    # Slow to import.
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _get_cache_folder() -> str:
    # Slow to import.
    from huggingface_hub import constants

    return os.fspath(constants.HF_HUB_CACHE)

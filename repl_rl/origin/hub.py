"""Models of the Hugging Face hub, through its own client: its cache, its token, its progress bars."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from repl_rl.errors import ConfigError

_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ANSWER_S = 10.0
"""How long the hub may take for the first answer: a person waits."""
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_UNWANTED = ["*/*", "consolidated*", "training_args*"]
"""Copies of the same weights in other layouts, most of them in folders of their own."""
_FLOORS = ("config.json", "adapter_config.json"), ("*.safetensors",)


@dataclass(frozen=True, slots=True)
class HubName:
    """`owner/name`, and which revision of it."""

    name: str
    revision: str | None = None
    """Branch, tag or commit; None: the default branch."""

    @classmethod
    def of(cls, text: str) -> Self | None:
        """`owner/name` or `owner/name@revision`; None: the text is neither."""
        found = _NAME.fullmatch(text)
        return cls(found["name"], found["revision"]) if found and not text.endswith(".gguf") else None

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name


@dataclass(frozen=True, slots=True)
class Copy:
    """A model in the hub's cache."""

    folder: Path
    name: HubName
    """With its commit."""
    fallback: str | None = None
    """Why it was taken although the hub may have a newer one; None: the hub was asked, or a commit was named."""


def download(name: HubName, tell: Callable[[str], None]) -> Copy:
    """That model in the hub's cache; what is not cached is downloaded.

    A commit that is cached whole is not asked for again. Where the hub does not answer, the cached copy of a branch or
    tag is taken, and that is told.

    Raises:
        ConfigError: there is no such model or revision, it may not be read, or it is not cached and cannot be had.
    """
    if name.revision and _COMMIT.fullmatch(name.revision) and (folder := _cached(name)):
        return Copy(folder, name)
    unreachable = _ask(name)
    if unreachable is None:
        tell(f"getting {name} from the hub ...")
        folder, fallback = _fetch(name), None
    elif (cached := _cached(name)) is not None:
        folder = cached
        fallback = f"the hub cannot be reached ({unreachable}); using the cached {name}, commit {folder.name}"
        tell(fallback)
    else:
        raise _missing(name, unreachable)
    return Copy(folder, replace(name, revision=folder.name), fallback)


def named(folder: Path) -> HubName | None:
    """The model whose commit `folder` is in the hub's cache; None: it is no such folder."""
    owner_and_name = folder.parent.parent.name.split("--")
    if folder.parent.name != "snapshots" or owner_and_name[0] != "models" or not _COMMIT.fullmatch(folder.name):
        return None
    return HubName("/".join(owner_and_name[1:]), folder.name)


def _ask(name: HubName) -> str | None:
    """Ask the hub whether it has that. Returns why it does not answer; None: it does, and it has.

    Raises:
        ConfigError: it has not, or refuses.
    """
    # half a second to import, as below: only names of the hub need it
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        HfApi().model_info(name.name, revision=name.revision, timeout=_ANSWER_S)
    except RevisionNotFoundError as error:
        raise ConfigError(f"revision of {name.name}", name.revision, "the hub has none of that name") from error
    except GatedRepoError as error:
        raise _gated(name) from error
    except RepositoryNotFoundError as error:
        remedy = f"no such folder is here, and {_endpoint()} has no such model or hides it; `hf auth login` shows yours"
        raise ConfigError("model", str(name), remedy) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            remedy = "the hub refuses your token; `hf auth login` gets a new one, or unset HF_TOKEN"
            raise ConfigError("model", str(name), remedy) from error
        return f"{_endpoint()} answers {status}"
    except Exception as error:  # of the HTTP library, which is another one in each version of the client
        return f"{_endpoint()}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return None


def _fetch(name: HubName) -> Path:
    from huggingface_hub import snapshot_download  # slow to import
    from huggingface_hub.errors import GatedRepoError

    try:
        found = snapshot_download(name.name, revision=name.revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
    except GatedRepoError as error:
        raise _gated(name) from error
    except Exception as error:  # as above, and a full disk
        reason = " ".join(str(error).split()) or type(error).__name__
        remedy = f"its download stopped: {reason}; what is complete is kept in {_cache()}, so try again"
        raise ConfigError("model", str(name), remedy) from error
    folder = Path(found)
    if (lacking := _lacking(folder)) is not None:
        remedy = f"it has no {lacking} at its top; name a model with safetensors weights"
        if lacking == "*.safetensors":
            remedy += f", or get a .gguf file of it (`hf download {name.name} FILE.gguf`) and give that"
        raise ConfigError("model", str(name), remedy)
    return folder


def _cached(name: HubName) -> Path | None:
    """Its folder in the cache, if everything is there."""
    from huggingface_hub import snapshot_download  # slow to import
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(
            name.name,
            revision=name.revision,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        return None
    return None if _lacking(Path(found)) else Path(found)


def _lacking(folder: Path) -> str | None:
    """What a folder with a model must have and this one has not."""
    for patterns in _FLOORS:
        if not any(True for pattern in patterns for _ in folder.glob(pattern)):
            return patterns[0]
    return None


def _missing(name: HubName, why: str) -> ConfigError:
    commits = sorted((Path(_cache()) / f"models--{name.name.replace('/', '--')}" / "snapshots").glob("*"))
    there = f"only {', '.join(c.name for c in commits)}, or parts of it" if commits else "nothing of it"
    download = f"hf download {name.name}" + (f" --revision {name.revision}" if name.revision else "")
    remedy = (
        f"there is no such folder, the cache {_cache()} has {there}, and the hub cannot be reached ({why}); run "
        f"`{download}` where it can, and bring the cache here (HF_HOME names its place)"
    )
    return ConfigError("model", str(name), remedy)


def _gated(name: HubName) -> ConfigError:
    remedy = f"accept its conditions at {_endpoint()}/{name.name}, then `hf auth login`, or set HF_TOKEN"
    return ConfigError("gated model", str(name), remedy)


def _endpoint() -> str:
    from huggingface_hub import constants  # slow to import

    return str(constants.ENDPOINT)


def _cache() -> str:
    from huggingface_hub import constants  # slow to import

    return os.fspath(constants.HF_HUB_CACHE)

"""Models of the hub: the real client against a small hub of our own, in processes that read its environment anew.

The client reads it when it is imported, so each process imports the client again.
"""

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import pytest

from repl_rl import cli
from repl_rl.errors import ConfigError
from repl_rl.models.hub import HubName, find_hub_name
from repl_rl.utils.package_data import find_asset
from tests.support.forked_commands import run_forked
from tests.support.hub_server import TOKEN, Hub, Repository, serving

PLAIN = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """Four models: a public one with copies in other formats, a private, a gated one, and one without safetensors."""
    files = tmp_path_factory.mktemp("files")
    for name in ("tiny", "private", "gated", "broken"):
        shutil.copytree(find_asset("policies/quickstart"), files / name)
    (files / "tiny" / "pytorch_model.bin").write_bytes(b"a copy")
    (files / "tiny" / "consolidated.safetensors").write_bytes(b"a copy")
    (files / "tiny" / "onnx").mkdir()
    (files / "tiny" / "onnx" / "config.json").write_text("{}")
    (files / "pickled").mkdir()
    (files / "pickled" / "config.json").write_text("{}")
    (files / "pickled" / "pytorch_model.bin").write_bytes(b"weights")
    models = {
        "org/tiny": Repository(files / "tiny"),
        "org/private": Repository(files / "private", private=True),
        "org/gated": Repository(files / "gated", gated=True),
        "org/broken": Repository(files / "broken", broken=True),
        "org/pickled": Repository(files / "pickled"),
    }
    with serving(Hub(models)) as running:
        yield running


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "hf"


def environment(address: str, home: Path, **more: str) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**plain, "HF_ENDPOINT": address, "HF_HOME": str(home), "NO_PROXY": "*", **more}


class Look(TypedDict, total=False):
    """What became of a name: found, or refused with a reason."""

    folder: str
    reference: str
    refused: str
    fallback: str | None
    told: list[str]


def look(model: str, address: str, home: Path, **more: str) -> Look:
    """Resolve `model` in a process of its own."""
    done = run_forked(resolve, ["look", model], env=environment(address, home, **more), cwd=home.parent, timeout_s=120)
    assert done.returncode == 0, done.stderr
    answer: Look = json.loads(done.stdout)
    return answer


def forget_client() -> None:
    """Let the next use of the client import it again."""
    for name in [name for name in sys.modules if name.startswith(("huggingface_hub", "repl_rl.models"))]:
        del sys.modules[name]


def resolve() -> None:
    """Print a `Look` of the model that the process was given."""
    forget_client()
    from repl_rl.models.resolve_model import resolve_model

    told: list[str] = []
    try:
        found = resolve_model(sys.argv[1], Path("models"), told.append)
        answer = {"folder": str(found.folder), "reference": found.reference, "fallback": found.fallback}
    except ConfigError as error:
        answer = {"refused": str(error)}
    print(json.dumps({**answer, "told": told}))


def closed_port() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_name_becomes_the_folder_of_its_commit_without_copies_in_other_formats(hub: Hub, home: Path) -> None:
    found = look("org/tiny", hub.address, home)
    commit = hub.models["org/tiny"].commit
    folder = Path(found["folder"])
    assert found["reference"] == f"org/tiny@{commit}"
    assert folder.is_relative_to(home)
    assert {file.name for file in folder.iterdir()} == PLAIN
    assert (folder / "model.safetensors").read_bytes() == (
        find_asset("policies/quickstart") / "model.safetensors"
    ).read_bytes()
    assert found["told"] == ["getting org/tiny from the hub ..."]
    assert found["fallback"] is None
    assert find_hub_name(folder) == HubName("org/tiny", commit)


def test_a_commit_that_is_cached_is_found_again_without_a_question(hub: Hub, home: Path) -> None:
    first = look("org/tiny@v1", hub.address, home)
    asked = len(hub.asked)
    again = look(first["reference"], hub.address, home)
    assert again["folder"] == first["folder"]
    assert (again["told"], again["fallback"]) == ([], None)
    assert len(hub.asked) == asked


def test_a_cached_model_works_offline_and_says_so_to_people_and_to_the_summary(hub: Hub, home: Path) -> None:
    first = look("org/tiny", hub.address, home)
    for address, more in ((hub.address, {"HF_HUB_OFFLINE": "1"}), (closed_port(), {})):
        again = look("org/tiny", address, home, **more)
        assert (again["folder"], again["reference"]) == (first["folder"], first["reference"])
        (told,) = again["told"]
        assert "cannot be reached" in told
        assert "using the cached org/tiny, commit " in told
        assert again["fallback"] == told


def test_a_folder_of_that_name_wins(hub: Hub, home: Path) -> None:
    shutil.copytree(find_asset("policies/quickstart"), home.parent / "org" / "tiny")
    asked = len(hub.asked)
    found = look("org/tiny", hub.address, home)
    assert (found["folder"], found["reference"], found["told"]) == ("org/tiny", "org/tiny", [])
    assert len(hub.asked) == asked


@pytest.mark.parametrize(
    ("model", "token", "parts"),
    [
        ("org/nosuch", "", ["model is 'org/nosuch'", "has no such model or hides it", "hf auth login"]),
        ("org/private", "", ["model is 'org/private'", "hides it"]),
        ("org/tiny@v9", "", ["revision of org/tiny is 'v9'", "has no such revision"]),
        ("org/gated", "", ["gated model is 'org/gated'", "accept its conditions at http", "HF_TOKEN"]),
        ("org/tiny", "hf_bad", ["model is 'org/tiny'", "refuses your token"]),
        ("org/broken", "", ["model is 'org/broken'", "its download stopped", "try again"]),
        ("org/pickled", "", ["model is 'org/pickled'", "no *.safetensors", "hf download org/pickled FILE.gguf"]),
    ],
)
def test_what_the_hub_refuses_is_told_in_one_line(
    hub: Hub, home: Path, model: str, token: str, parts: list[str]
) -> None:
    answer = look(model, hub.address, home, **({"HF_TOKEN": token} if token else {}))
    refused = answer["refused"]
    assert not [part for part in parts if part not in refused], refused
    assert "\n" not in refused


def test_a_token_opens_what_is_private_or_gated(hub: Hub, home: Path) -> None:
    for name in ("org/private", "org/gated"):
        assert look(name, hub.address, home, HF_TOKEN=TOKEN)["reference"].startswith(f"{name}@")


@pytest.mark.parametrize("model", ["org/tiny", f"org/tiny@{'0' * 40}"])
@pytest.mark.parametrize("offline", [True, False])
def test_what_is_missing_without_network_is_named_at_once(hub: Hub, home: Path, model: str, offline: bool) -> None:
    begun = time.monotonic()
    refused = look(model, closed_port(), home, **({"HF_HUB_OFFLINE": "1"} if offline else {}))["refused"]
    assert time.monotonic() - begun < 15
    name, _, revision = model.partition("@")
    command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    for part in (f"model is '{model}'", f"{home}/hub has nothing of it", "cannot be reached", command, "HF_HOME"):
        assert part in refused, refused


@pytest.mark.parametrize("listed", [True, False])
def test_a_torn_copy_in_the_cache_is_not_taken_for_the_model(hub: Hub, home: Path, listed: bool) -> None:
    first = look("org/tiny", hub.address, home)
    (Path(first["folder"]) / "model.safetensors").unlink()
    if not listed:  # as older clients leave it: without the list of the model's files
        shutil.rmtree(home / "hub" / "models--org--tiny" / "trees")
    refused = look(first["reference"], closed_port(), home)["refused"]
    assert "parts of it" in refused
    whole = look(first["reference"], hub.address, home)
    assert (Path(whole["folder"]) / "model.safetensors").is_file()


def test_a_hub_that_is_out_of_order_is_one_that_cannot_be_reached(home: Path) -> None:
    with serving(Hub({}, status=503)) as broken:
        assert "answers 503" in look("org/tiny", broken.address, home)["refused"]


@pytest.mark.parametrize("address", ["hub", pytest.param("closed", marks=pytest.mark.heavy)])
def test_training_on_an_unknown_name_leaves_nothing(hub: Hub, home: Path, address: str) -> None:
    def train() -> None:
        forget_client()
        cli.run()

    argv = ["repl-rl", "train", "--model", "org/nosuch", "--out", "runs"]
    asked = environment(hub.address if address == "hub" else closed_port(), home)
    done = run_forked(train, argv, env=asked, cwd=home.parent, timeout_s=200)
    assert done.returncode == 2, done.stderr
    (error,) = done.stderr.splitlines()
    assert error.startswith("repl-rl: error: model is 'org/nosuch'")
    assert not (home.parent / "runs").exists()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name")),
        ("org/name@refs/pr/1", HubName("org/name", "refs/pr/1")),
        ("name", None),
        ("./org/name", None),
        ("/org/name", None),
        ("a/b/c", None),
        ("org/name.gguf", None),
        ("org/name@", None),
    ],
)
def test_what_is_a_name_of_the_hub(text: str, name: HubName | None) -> None:
    assert HubName.parse(text) == name
    assert name is None or str(name) == text

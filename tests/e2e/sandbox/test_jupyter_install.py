"""`repl-rl kernel install` writes a kernelspec that Jupyter finds and starts, or says in one line why not."""

import ast
import json
import os
import tempfile
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager

from repl_rl.cli import main
from repl_rl.sandbox import jupyter_kernelspec as jupyter
from tests.support.sandbox.kernel_client import started


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far from the repository, with folders of Jupyter's own."""
    monkeypatch.chdir(tmp_path)
    for kind in ("DATA", "RUNTIME", "CONFIG"):
        monkeypatch.setenv(f"JUPYTER_{kind}_DIR", str(tmp_path / kind.lower()))
    # Else a kernel that was installed into the environment of the tests goes before one of the same name.
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")


@pytest.mark.parametrize("flags", [(), ("--no-isolated",)])
def test_the_installed_kernel_starts_by_its_name(flags: tuple[str, ...], tmp_path: Path) -> None:
    assert main(["kernel", "install", "--user", *flags]) == 0
    with started() as client:
        ran = client.run(f"import os; os.path.exists({str(tmp_path)!r})")
        assert ran.data("execute_result") == [{"text/plain": str(bool(flags))}]


def test_an_isolated_kernel_starts_where_the_temporary_folder_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    """As root, the kernel is another user, whom the folders above its connection file must let through."""
    with tempfile.TemporaryDirectory(prefix="private-") as private:
        monkeypatch.setattr(tempfile, "tempdir", private)
        assert main(["kernel", "install", "--user"]) == 0
        with started() as client:
            assert client.run("6 * 7").data("execute_result") == [{"text/plain": "42"}]


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's kernel has that user's files anyway")
def test_files_of_an_isolated_kernel_of_root_are_not_roots() -> None:
    """Its folder of sockets is on the host, where a file of root that sets the user id would make anyone root."""
    assert main(["kernel", "install", "--user"]) == 0
    with started() as client:
        folder = Path(client.manager.connection_file).parent
        ran = client.run(
            "import os\n"
            f"d = {str(folder)!r}\n"
            "open(d + '/mine', 'w').close(); os.chmod(d + '/mine', 0o4755)\n"
            "open('/tmp/scratch', 'w').close()\n"
            "os.getuid(), os.stat(d + '/mine').st_uid"
        )
        (shown,) = ran.data("execute_result")
        uid, owner = ast.literal_eval(str(shown["text/plain"]))
        assert uid == owner == (folder / "mine").stat().st_uid > 1_000_000


def test_an_isolated_kernel_starts_where_addresses_in_the_temporary_folder_would_be_too_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / "temporary files of a job of a cluster" / "whose path is longer than the address of a socket"
    long.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert main(["kernel", "install", "--user"]) == 0
    with started() as client:
        assert client.run("6 * 7").data("execute_result") == [{"text/plain": "42"}]


def test_the_place_and_the_name_can_be_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kernel", "install", "--prefix", "here", "--name", "mine", "--no-isolated"]) == 0
    data = tmp_path / "here" / "share" / "jupyter"
    assert f"JUPYTER_PATH={data}" in capsys.readouterr().out
    monkeypatch.setenv("JUPYTER_PATH", str(data))
    spec = KernelSpecManager().get_kernel_spec("mine")
    assert spec.display_name == "Python console (mine, not isolated)"
    assert all(Path(word).is_absolute() for word in spec.argv[:2])
    assert main(["kernel", "install", "--prefix", "here", "--name", "mine"]) == 0
    metadata = json.loads((data / "kernels" / "mine" / "kernel.json").read_text())["metadata"]
    assert metadata["kernel_provisioner"]["provisioner_name"] == jupyter.PROVISIONER
    assert [path.name for path in (data / "kernels" / "mine").iterdir()] == ["kernel.json"]


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--prefix /dev/null/x", ["'/dev/null/x/share/jupyter/kernels/repl-rl'", "Not a directory", "--user"]),
        ("--user --prefix x", ["more than one", "one of --user, --prefix and --sys-prefix"]),
        ("--name a/b", ["'a/b'", "letters, digits"]),
        ("--isolatet", ["unknown option", "did you mean"]),
    ],
)
def test_what_cannot_be_installed_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, parts: list[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main(["kernel", "install", *flags.split()]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(part in said for part in parts)
    assert sorted(tmp_path.rglob("*")) == before


def test_without_bubblewrap_only_the_kernel_that_is_not_isolated_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["kernel", "install", "--user"]) == 2
    assert "--no-isolated" in capsys.readouterr().err
    assert main(["kernel", "install", "--user", "--no-isolated"]) == 0

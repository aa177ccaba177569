"""The check of torch's companions."""

from pathlib import Path

import pytest

from repl_rl.utils.installed_versions import COMPANIONS, find_broken_companions, get_version, is_importable, main


def test_what_is_not_installed_is_not_broken() -> None:
    assert not get_version("a-package-that-nobody-wrote")
    assert find_broken_companions(["a-package-that-nobody-wrote"]) == []


def test_an_installed_package_that_cannot_be_imported_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halfbuilt.py").write_text("raise OSError('could not load this library')")
    metadata = tmp_path / "halfbuilt-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: halfbuilt\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert get_version("halfbuilt")
    assert not is_importable("halfbuilt")
    assert find_broken_companions(["halfbuilt", "pytest"]) == ["halfbuilt"]


def test_nothing_is_broken_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_broken_companions(COMPANIONS) == []
    assert main([]) == 0
    assert "can be imported" in capsys.readouterr().out

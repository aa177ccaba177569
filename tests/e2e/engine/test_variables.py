"""Environment variables that vLLM needs for a while do not stay."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from repl_rl.engine.vllm_subprocess import get_log_variables, get_preload_variables, open_socket_folder, set_environment
from repl_rl.utils.file_lock import OWNER


def test_what_was_set_or_changed_in_the_block_is_gone_after_it() -> None:
    before = dict(os.environ)
    with set_environment({"REPL_RL_TEST": "1", "PATH": "/nowhere"}):
        assert os.environ["REPL_RL_TEST"] == "1"
        os.environ["LD_PRELOAD"] = "left-behind.so"
    assert dict(os.environ) == before


def test_the_quiet_that_a_block_sets_is_not_taken_for_a_persons_wish_to_see_vllms_log() -> None:
    quiet = get_log_variables()
    with set_environment(quiet):
        assert get_log_variables() == quiet
    assert quiet["PYTHONWARNINGS"] == "ignore::FutureWarning"


@pytest.mark.heavy
def test_importing_the_trainer_prints_nothing_and_what_trl_sets_is_no_persons_wish_to_see_vllms_log() -> None:
    code = "import trl, repl_rl.trainer.trl_arguments; "
    code += "from repl_rl.engine.vllm_subprocess import get_log_variables; print(*sorted(get_log_variables()))"
    before = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    done = subprocess.run([sys.executable, "-c", code], env=before, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["PYTHONWARNINGS", "TORCH_CPP_LOG_LEVEL", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS"]
    assert done.stderr == ""


@pytest.mark.heavy
def test_a_program_imports_trl_without_vllm_and_a_library_leaves_vllm_to_its_user() -> None:
    imported = "import sys, repl_rl.trainer.trl_arguments, trl.import_utils as of_trl; print('vllm' in sys.modules)"
    program = "from repl_rl.utils.import_trl import skip_vllm_in_trl; skip_vllm_in_trl(); "
    for code, there in ((imported, True), (program + imported, False)):
        code += "; print(of_trl.is_vllm_available())"
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(there), "True"], "what was found before is found again"


def test_the_training_verb_starts_without_vllm() -> None:
    code = "import atexit, sys, repl_rl.cli; atexit.register(lambda: print('vllm' in sys.modules)); repl_rl.cli.run()"
    done = subprocess.run([sys.executable, "-c", code, "train", "--help"], capture_output=True, text=True, check=True)
    assert "--trainer.steps" in done.stdout
    assert done.stdout.split()[-1] == "False"


def test_a_level_that_a_person_sets_is_heeded() -> None:
    code = (
        "from repl_rl.engine.vllm_subprocess import get_log_variables; "
        "print(get_log_variables()['VLLM_LOGGING_LEVEL'], len(get_log_variables()))"
    )
    told = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
    done = subprocess.run([sys.executable, "-c", code], env=told, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["INFO", "2"]


def test_a_block_waits_for_the_block_of_another_thread() -> None:
    before = dict(os.environ)
    inside = threading.Event()

    def use() -> None:
        with set_environment({"REPL_RL_TEST": "other"}):
            inside.set()

    other = threading.Thread(target=use)
    with set_environment({"REPL_RL_TEST": "mine"}):
        other.start()
        assert not inside.wait(0.2)
    other.join()
    assert inside.is_set()
    assert dict(os.environ) == before


def test_what_vllm_preloads_is_found_by_the_loader_below_a_path_with_spaces(tmp_path: Path) -> None:
    packages = tmp_path / "größer als gedacht"
    (packages / "torch" / "lib").mkdir(parents=True)
    with open("/proc/self/maps") as maps:
        some_library = next(line.split()[-1] for line in maps if "/libm.so" in line or "/libm-" in line)
    shutil.copy(some_library, packages / "torch" / "lib" / "libgomp-1.so.1")
    variables = get_preload_variables(packages)
    assert "libgomp" in variables["LD_PRELOAD"], "by this name vLLM knows that nothing is left to do"
    done = subprocess.run(
        ["cat", "/proc/self/maps"], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert str(packages / "torch" / "lib") in done.stdout
    assert get_preload_variables(tmp_path) == {}


def test_sockets_have_a_folder_that_goes_with_them_and_a_short_name_where_the_temporary_one_has_a_long_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    for root in (long, Path(tempfile.mkdtemp(dir="/tmp"))):
        monkeypatch.setattr(tempfile, "tempdir", str(root))
        with open_socket_folder() as variables:
            (folder,) = root.iterdir()
            short = Path(variables["VLLM_RPC_BASE_PATH"])
            (short / "here").touch()
            assert sorted(file.name for file in folder.iterdir()) == [OWNER, "here"]
            assert len(str(short)) <= 60
        assert list(root.iterdir()) == []
    root.rmdir()

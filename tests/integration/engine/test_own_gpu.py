"""Among processes that a launcher started together each samples on the GPU that it trains on."""

import pytest

from repl_rl.engine.vllm_engine import get_device_environment
from repl_rl.utils.processes import choose_gpu

SEEN = "CUDA_VISIBLE_DEVICES"


def launched(patch: pytest.MonkeyPatch, number: int, of: int, seen: str | None = None) -> None:
    patch.setenv("LOCAL_RANK", str(number))
    patch.setenv("LOCAL_WORLD_SIZE", str(of))
    patch.delenv(SEEN, raising=False)
    if seen is not None:
        patch.setenv(SEEN, seen)


def test_processes_of_one_machine_take_its_gpus_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        launched(monkeypatch, number, 8)
        assert get_device_environment(SEEN, 8) == {SEEN: str(number)}
        assert choose_gpu(8) == number


def test_the_gpus_that_a_process_is_shown_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 1, 2, "4,GPU-8932f937")
    assert get_device_environment(SEEN, 2) == {SEEN: "GPU-8932f937"}


def test_a_process_that_is_shown_one_gpu_alone_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 3, 4, "6")
    assert get_device_environment(SEEN, 1) == {SEEN: "6"}
    assert choose_gpu(1) == 0


def test_a_process_on_its_own_shows_its_engine_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert get_device_environment(SEEN, 8) == {}
    assert choose_gpu(8) == 0

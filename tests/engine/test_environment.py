"""Environment variables that vLLM needs for a while do not stay."""

import os
from concurrent.futures import ThreadPoolExecutor

from repl_rl.engine.environment import environment


def test_what_was_set_or_changed_in_the_block_is_gone_after_it() -> None:
    before = dict(os.environ)
    with environment({"REPL_RL_TEST": "1", "PATH": "/nowhere"}):
        assert os.environ["REPL_RL_TEST"] == "1"
        os.environ["LD_PRELOAD"] = "left-behind.so"
    assert dict(os.environ) == before


def test_blocks_of_several_threads_leave_nothing_behind() -> None:
    before = dict(os.environ)

    def use(number: int) -> None:
        with environment({f"REPL_RL_TEST_{number % 5}": str(number)}):
            assert os.environ[f"REPL_RL_TEST_{number % 5}"] == str(number)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(2000)))
    assert dict(os.environ) == before

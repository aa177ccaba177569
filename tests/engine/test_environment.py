"""Environment variables that vLLM needs for a while do not stay."""

import os
import threading

from repl_rl.engine.environment import environment


def test_what_was_set_or_changed_in_the_block_is_gone_after_it() -> None:
    before = dict(os.environ)
    with environment({"REPL_RL_TEST": "1", "PATH": "/nowhere"}):
        assert os.environ["REPL_RL_TEST"] == "1"
        os.environ["LD_PRELOAD"] = "left-behind.so"
    assert dict(os.environ) == before


def test_a_block_waits_for_the_block_of_another_thread() -> None:
    before = dict(os.environ)
    inside = threading.Event()

    def use() -> None:
        with environment({"REPL_RL_TEST": "other"}):
            inside.set()

    other = threading.Thread(target=use)
    with environment({"REPL_RL_TEST": "mine"}):
        other.start()
        assert not inside.wait(0.2)
    other.join()
    assert inside.is_set()
    assert dict(os.environ) == before

"""Where a chunk ends, when several reasons meet in one id."""

from repl_rl.engine.base import ChunkEnd, find_chunk_end


def test_a_stop_id_wins_over_the_watch_and_both_over_the_length() -> None:
    assert find_chunk_end(7, 9, 9, frozenset({7}), lambda _: True) is ChunkEnd.STOP_ID
    assert find_chunk_end(8, 9, 9, frozenset({7}), lambda _: True) is ChunkEnd.WATCH
    assert find_chunk_end(8, 9, 9, frozenset({7}), lambda _: False) is ChunkEnd.LENGTH
    assert find_chunk_end(8, 8, 9, frozenset({7}), None) is None


def test_the_watch_sees_a_stop_id_too() -> None:
    seen: list[int] = []

    def watch(token_id: int) -> bool:
        seen.append(token_id)
        return False

    find_chunk_end(7, 1, 9, frozenset({7}), watch)
    assert seen == [7]

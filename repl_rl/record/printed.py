"""Which tokens a console printed, and a policy can therefore be taught to predict."""

from collections.abc import Iterator

from repl_rl.record.trajectory import Observed, Trajectory


def printed(trajectory: Trajectory, forbidden_ids: frozenset[int] = frozenset()) -> tuple[bool, ...]:
    """True at the completion tokens that are the console's own words, shape (T,).

    These are the tokens of observations, prompts (`>>> `) among them: the console prints them, and a tokenizer may have
    glued them to the output before them. Two kinds are left out. An observation whose middle was cut has a marker of
    ours in it, and what follows the gap is not what followed in the console. An id of `forbidden_ids` has probability
    0, which no teaching changes. The banner before the first line belongs to the prompt and is no observation.
    """
    return tuple(_printed(trajectory, forbidden_ids))


def _printed(trajectory: Trajectory, forbidden_ids: frozenset[int]) -> Iterator[bool]:
    for segment in trajectory.segments:
        whole = isinstance(segment, Observed) and not segment.cut
        for token in segment.token_ids:
            yield whole and token not in forbidden_ids

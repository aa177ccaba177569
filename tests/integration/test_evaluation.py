"""Held-out figures, and the question whether answers follow what the console printed."""

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repl_rl.cli import main
from repl_rl.errors import ConfigError
from repl_rl.evaluation import (
    EvaluationFolder,
    Study,
    TaskResult,
    alter_text,
    compare,
    compute_bootstrap_interval,
    compute_bounded_mean_interval,
    compute_sign_test,
    compute_tampering_follow_rate,
    pass_at_k,
    play_all,
    read_study,
    run_evaluation,
    wilson,
    write_study,
)
from repl_rl.rollout import Rollouts, SyncRollouts
from repl_rl.tasks import Split, Task, get_split
from repl_rl.trajectory.trajectory import Failure, FailureKind, Sampled, Stop, Trajectory
from repl_rl.trajectory.trajectory_metrics import compute_trajectory_metrics
from tests.support.played_lines import play
from tests.support.scripted_rollouts import TASK, world


def test_altered_output_differs_in_every_digit_and_letter_and_keeps_its_shape() -> None:
    assert alter_text("[160, -9]\n'abz'\n") == "[275, -1]\n'ecb'\n"


def test_a_console_is_altered_in_what_it_shows_and_not_in_what_it_computes() -> None:
    (t,) = play(["x = 6 * 7\n", "x\n", "submit_final_answer(x)\n"], altered=True)
    assert "53\n>>> " in "".join(s.text for s in t.segments if hasattr(s, "text"))
    assert t.answer == "42"


def test_an_answer_that_repeats_what_was_shown_follows_it() -> None:
    assert compute_tampering_follow_rate(play(["6 * 7\n", "submit_final_answer(53)\n"], altered=True)) == 1.0
    assert compute_tampering_follow_rate(play(["'ab'\n", "submit_final_answer('ec')\n"], altered=True)) == 1.0


def test_an_answer_that_repeats_the_truth_does_not_follow() -> None:
    assert compute_tampering_follow_rate(play(["6 * 7\n", "submit_final_answer(42)\n"], altered=True)) == 0.0


@pytest.mark.parametrize("lines", [["submit_final_answer(42)\n"], ["6 * 7\n", "submit_final_answer(6 * 7)\n"]])
def test_without_an_output_or_a_literal_there_is_nothing_to_follow(lines: list[str]) -> None:
    assert compute_tampering_follow_rate(play(lines, altered=True)) is None


HARD_LITERALS = ["-" * 9000 + "1", "[" * 9000, "+".join("1" * 3000), "0x" + "f" * 9000, "{[]: 1}", "{[]}"]


@pytest.mark.parametrize("submitted", HARD_LITERALS)
def test_a_submitted_text_that_python_can_hardly_read_is_no_literal(submitted: str) -> None:
    (t,) = play(["6 * 7\n", "submit_final_answer(53)\n"], altered=True)
    *_, last = (segment for segment in t.segments if isinstance(segment, Sampled))
    line = replace(last.lines[-1], text=f"submit_final_answer({submitted})\n")
    altered = replace(last, lines=(*last.lines[:-1], line))
    segments = tuple(altered if segment is last else segment for segment in t.segments)
    assert compute_tampering_follow_rate([replace(t, segments=segments)]) is None


def test_errors_are_shown_unaltered() -> None:
    (t,) = play(["1/0\n", "submit_final_answer(1)\n"], altered=True)
    assert any("ZeroDivisionError" in s.text for s in t.segments if hasattr(s, "text"))


def test_rates_count_what_they_say() -> None:
    figures = compute_trajectory_metrics(
        play(["1/0\n", "# why\n", "print(1)\n", "print(1)\n", "submit_final_answer(42)\n"])
    )
    assert figures["solve_rate"] == 1.0
    assert figures["line_error_rate"] == pytest.approx(1 / 5)
    assert figures["void_line_rate"] == pytest.approx(1 / 5)
    assert figures["print_rate"] == pytest.approx(2 / 5)
    assert figures["repeat_rate"] == pytest.approx(1 / 4)
    assert figures["lines_per_rollout"] == 5


def test_nothing_has_rates_of_nought() -> None:
    assert set(compute_trajectory_metrics([]).values()) == {0.0}


def test_an_evaluation_tells_solve_rates_by_family() -> None:
    def opener() -> AbstractAsyncContextManager[Rollouts]:
        return nullcontext(world(["submit_final_answer(42)\n"]))

    tasks = [replace(TASK, id="a", family="easy"), replace(TASK, id="b", answer="7", family="hard")]
    with SyncRollouts(opener, {}) as source:
        result = run_evaluation(source, tasks)
    assert (result.solve_rate.value, result.greedy and result.greedy.value) == (0.5, 0.5)
    assert {name: part.solve_rate.value for name, part in result.families.items()} == {"easy": 1.0, "hard": 0.0}
    assert str(result) == "solved 50.0% at temperature 1, 50.0% greedy, 0.0% of lines in error"


def test_wilson_gives_the_published_values() -> None:
    some, none, every = wilson(8, 10), wilson(0, 10), wilson(10, 10)
    assert (round(some.low, 4), round(some.high, 4)) == (0.4902, 0.9433)
    assert (none.low, round(none.high, 4)) == (0.0, 0.2775)
    assert (round(every.low, 4), every.high) == (0.7225, 1.0)
    assert str(some) == "80.0% (49.0% to 94.3%)"


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_share_and_stays_within_bounds(counts: tuple[int, int]) -> None:
    interval = wilson(*counts)
    assert 0 <= interval.low <= interval.value <= interval.high <= 1
    assert interval.low < interval.high


@given(outcomes=st.lists(st.booleans(), min_size=1, max_size=7), data=st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_rollouts_with_a_right_one(
    outcomes: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(outcomes)))
    choices = [any(choice) for choice in combinations(outcomes, k)]
    assert pass_at_k(sum(outcomes), len(outcomes), k) == pytest.approx(sum(choices) / len(choices))


@settings(max_examples=10)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_a_bootstrap_holds_the_mean_and_repeats_exactly(values: list[float]) -> None:
    interval = compute_bootstrap_interval(values)
    assert interval == compute_bootstrap_interval(values)
    assert min(values) - 1e-9 <= interval.low <= interval.value <= interval.high <= max(values) + 1e-9


def test_a_bootstrap_is_about_as_wide_as_the_normal_interval() -> None:
    values = [0.0] * 50 + [1.0] * 50
    interval = compute_bootstrap_interval(values)
    assert interval.low == pytest.approx(0.402, abs=0.02)
    assert interval.high == pytest.approx(0.598, abs=0.02)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_tasks_that_are_solved_or_not_have_the_interval_of_wilson(value: float) -> None:
    values = [value] * 7 + [1.0] * 3
    found, known = compute_bounded_mean_interval(values), wilson(round(sum(values)), 10)
    assert (found.low, found.high) == pytest.approx((known.low, known.high))


@pytest.mark.parametrize("value", [0.0, 0.25, 0.5, 1.0])
def test_one_task_tells_little_about_its_family(value: float) -> None:
    found = compute_bounded_mean_interval([value])
    assert found.value == value
    assert found.high - found.low > 0.5


@given(st.lists(st.floats(-1, 1, allow_subnormal=False), min_size=1, max_size=60))
def test_an_interval_holds_its_mean_stays_within_bounds_and_is_never_without_width(values: list[float]) -> None:
    found = compute_bounded_mean_interval(values, -1.0)
    assert -1 - 1e-9 <= found.low <= found.value <= found.high <= 1 + 1e-9
    assert found.high - found.low > 1e-3 or len(set(values)) > 1


@pytest.mark.parametrize("tasks", [1, 2, 5, 10])
def test_intervals_of_few_tasks_hold_the_true_mean_as_often_as_they_say(tasks: int) -> None:
    draw = random.Random(0)
    held = 0
    for _ in range(400):
        rates = [draw.betavariate(1, 1) for _ in range(tasks)]
        found = compute_bounded_mean_interval([sum(draw.random() < rate for _ in range(4)) / 4 for rate in rates])
        held += found.low <= 0.5 <= found.high
    assert held / 400 >= 0.95


def test_the_sign_test_gives_the_published_values() -> None:
    assert compute_sign_test(9, 1) == pytest.approx(22 / 1024)
    assert compute_sign_test(1, 9) == compute_sign_test(9, 1)
    assert compute_sign_test(0, 0) == compute_sign_test(3, 3) == 1.0


@pytest.mark.parametrize("bad", [lambda: wilson(1, 0), lambda: pass_at_k(1, 2, 3),
                                 lambda: compute_bootstrap_interval([]),
                                 lambda: compute_sign_test(-1, 0), lambda: wilson(3, 2)])  # fmt: skip
def test_impossible_counts_are_refused(bad: object) -> None:
    assert callable(bad)
    with pytest.raises(ConfigError):
        bad()


def study(solved: Sequence[int], rollouts: int = 1, family: str = "f") -> Study:
    return Study(tuple(TaskResult(f"{family}{n}", family, rollouts, s, None, 2, 0, 0) for n, s in enumerate(solved)))


def test_a_comparison_pairs_tasks_and_tells_more_than_two_intervals() -> None:
    hard_for_both = [0] * 40 + [1] * 40
    result = compare(study([*hard_for_both, *[1] * 10]), study([*hard_for_both, *[0] * 10]))
    assert result.difference.value == pytest.approx(1 / 9)
    assert result.difference.low > 0.03
    assert (result.better_tasks, result.worse_tasks) == (10, 0)
    assert result.p_value == pytest.approx(2 / 1024)
    assert str(result).startswith("+11.1 points (")
    assert compare(study([1, 0]), study([1, 0])).difference.value == 0


def test_only_evaluations_of_the_same_tasks_are_compared() -> None:
    with pytest.raises(ConfigError, match=r"tasks in one of the two evaluations only is \(1, \['f2'\]\)"):
        compare(study([1, 0, 1]), study([1, 0]))


TASKS = [replace(TASK, id=f"t{n}", family="odd" if n % 2 else "even") for n in range(150)]


class Player:
    """Plays rollouts of a script and remembers how many; it may be interrupted or fail on our side."""

    def __init__(self, lines: Sequence[str] = ("submit_final_answer(42)\n",), interrupted_at: int = 10**9) -> None:
        self.rollouts = world(list(lines))
        self.played = 0
        self.calls = 0
        self.interrupted_at = interrupted_at

    def __call__(self, tasks: Sequence[Task], temperature: float) -> Sequence[Trajectory]:
        self.calls += 1
        if self.calls == self.interrupted_at:
            raise KeyboardInterrupt
        self.played += len(tasks)
        return asyncio.run(self.rollouts.collect(tasks, temperature))


def test_an_interrupted_evaluation_goes_on_where_it_stopped_and_finds_the_same(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path / "e", "seed = 0\n")
    first, second, whole, again = Player(interrupted_at=4), Player(), Player(), Player()
    with pytest.raises(KeyboardInterrupt):
        play_all(TASKS, first, 2, True, folder)
    resumed = play_all(TASKS, second, 2, True, EvaluationFolder(tmp_path / "e", "seed = 0\n"))
    assert first.played + second.played == 3 * len(TASKS)
    assert first.played == 64 * 3 + 64 * 2
    assert resumed == play_all(TASKS, whole, 2)
    play_all(TASKS, again, 2, True, folder)
    assert again.played == 0


def test_an_evaluation_that_goes_on_has_nothing_of_a_process_that_was_killed_while_it_wrote(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path / "e", "seed = 0\n")
    play_all(TASKS[:3], Player(), folder=folder)
    left = tmp_path / "e" / "greedy" / ".000000.jsonl.gz.999999999.unfinished"
    left.touch()
    with folder.lock():
        assert not left.exists()


def test_an_evaluation_whose_settings_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b"\xff\xfe = 0\n")
    with pytest.raises(ConfigError, match=r"config.toml cannot be read: .* name another folder"):
        EvaluationFolder(tmp_path, "seed = 0\n")
    assert (tmp_path / "config.toml").read_bytes() == b"\xff\xfe = 0\n"


def test_a_folder_of_another_evaluation_is_left_alone(tmp_path: Path) -> None:
    play_all(TASKS[:3], Player(), folder=EvaluationFolder(tmp_path / "e", "seed = 0\n"))
    with pytest.raises(ConfigError, match=r"other settings \(seed = 0; seed = 1\); name another folder"):
        EvaluationFolder(tmp_path / "e", "seed = 1\n")
    with pytest.raises(ConfigError, match="its tasks are not those of this evaluation"):
        play_all(TASKS[1:4], Player(), folder=EvaluationFolder(tmp_path / "e", "seed = 0\n"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear reader")
    with pytest.raises(ConfigError, match="it holds something else"):
        EvaluationFolder(tmp_path / "mine", "seed = 0\n")


def test_figures_are_told_by_family_and_survive_a_file(tmp_path: Path) -> None:
    tasks = [replace(t, answer="42" if t.family == "odd" else "7") for t in TASKS[:40]]
    found = play_all(tasks, Player(["1/0\n", "submit_final_answer(42)\n"]), samples=3)
    assert {name: part.solve_rate.value for name, part in found.families.items()} == {"even": 0.0, "odd": 1.0}
    assert found.greedy == wilson(20, 40)
    assert found.solve_rate.value == 0.5
    assert found.line_error_rate == 0.5
    three = found.pass_at(3)
    assert three is not None
    assert three.value == 0.5
    assert found.pass_at(4) is None
    write_study(tmp_path / "new" / "eval.json", found, 3, {"model": "m"})
    assert read_study(tmp_path / "new" / "eval.json") == found
    record = json.loads((tmp_path / "new" / "eval.json").read_text())
    assert record["pass@3"]["value"] == record["solve_rate"]["value"] == 0.5
    odd = wilson(20, 20)
    assert record["families"]["odd"] == {"value": 1.0, "low": odd.low, "high": 1.0}


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": 99}', '{"schema_version": 1, "results": [{}]}'])
def test_a_file_that_is_no_evaluation_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "e.json").write_text(text)
    with pytest.raises(ConfigError, match=r"evaluation file is .*e\.json"):
        read_study(tmp_path / "e.json")
    with pytest.raises(ConfigError, match="it cannot be read: No such file"):
        read_study(tmp_path / "absent.json")


def test_rollouts_that_failed_on_our_side_count_nowhere_but_are_told() -> None:
    def play(tasks: Sequence[Task], temperature: float) -> Sequence[Trajectory]:
        played = Player()(tasks, temperature)
        failure = Failure(FailureKind.SANDBOX_FAULT, "lost")
        broken = replace(played[0], stop=Stop.FAULT, failure=failure, outcome=None)
        return [broken, *played[1:]]

    found = play_all(TASKS[:4], play, samples=1)
    assert (found.solve_rate.value, found.faults) == (1.0, 2)
    assert found.solve_rate == wilson(3, 3)
    with pytest.raises(ConfigError, match="every rollout failed on our side"):
        play_all(TASKS[:1], play)


EVAL = ("eval", "--engine", "transformers", "--sandbox", "unsafe", "--tasks", "builtin:count", "--concurrency", "4")


def test_a_file_that_is_a_test_set_is_played_as_a_whole(tmp_path: Path) -> None:
    questions = [{"id": str(n), "question": f"What is {n} + {n}?", "answer": 2 * n} for n in range(6)]
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in questions))
    assert {get_split(str(question["question"])) for question in questions} == {Split.TRAIN, Split.HELD_OUT}
    flags = ("--tasks", str(file), "--split", "all", "--no-greedy", "--json", str(tmp_path / "figures.json"))
    assert main(["eval", "--engine", "transformers", "--sandbox", "unsafe", "--concurrency", "4", *flags]) == 0
    assert json.loads((tmp_path / "figures.json").read_text())["tasks"] == 6


def test_the_verb_keeps_resumes_compares_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "e")
    flags = (*EVAL, "--count", "4", "--samples", "2", "--out", out)
    assert main([*flags, "--k", "2"]) == 0
    assert "pass@2" in capsys.readouterr().out
    record = json.loads((tmp_path / "e" / "eval.json").read_text())
    assert (record["tasks"], len(record["results"]), record["results"][0]["rollouts"]) == (4, 4, 2)
    assert main([*flags, "--baseline", str(tmp_path / "e" / "eval.json")]) == 0
    shown = capsys.readouterr().out
    assert "+0.0 points (-49.0 to +49.0), better on 0 tasks, worse on 0, p = 1" in shown
    assert main([*EVAL, "--count", "5", "--baseline", str(tmp_path / "e" / "eval.json")]) == 2
    assert "tasks in one of the two evaluations only is (1, ['count-" in capsys.readouterr().err
    assert main([*flags, "--seed", "1"]) == 2
    assert "other settings" in capsys.readouterr().err
    (tmp_path / "way").write_text("in the way of a folder")
    assert main([*flags, "--json", str(tmp_path / "way" / "figures.json")]) == 2
    assert "it cannot be written there: " in capsys.readouterr().err
    assert main([*EVAL, "--k", "2"]) == 2
    assert "k is 2; give at most --samples, which is 1" in capsys.readouterr().err

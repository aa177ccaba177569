"""The credit experiment: what is compared, in which order it is played, and that nothing is played twice."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path

import pytest

from benchmarks.credit.conditions import (
    AGED,
    BASELINE,
    CONDITIONS,
    ERRORS,
    ESTIMATORS,
    FIXED_PENALTY,
    MERGED,
    REPORTED_SHAPINGS,
    SAME_AS,
    SHAPINGS,
    Condition,
    conditions,
)
from benchmarks.credit.experiment import Experiment, run_experiment
from benchmarks.credit.experiment_plan import chosen_rates
from benchmarks.credit.jobs import TUNING, Job, jobs, play_all, tuning_jobs
from benchmarks.credit.processes import Processes
from benchmarks.credit.rows import Row, RowFile, Run, Start, parse, record
from benchmarks.credit.settings import Settings, header
from benchmarks.credit.worker import trainer_config
from repl_rl.credit.advantage_estimators import GroupRewards, load_estimator
from repl_rl.credit.rewards import RewardTable, build_group_entry, compute_group_advantages
from repl_rl.errors import ConfigError, ReplRLError
from repl_rl.trainer.trl_arguments import build_credit_config
from repl_rl.trajectory.trajectory import Group
from repl_rl.utils.package_data import find_asset
from tests.support.scripted_rollouts import TASK, world

BASE = find_asset("policies/quickstart")

START = Start("lines", {"solve_rate": 0.2, "greedy": 0.1}, 1.0)
AFTER = {"solve_rate": 0.9, "greedy": 1.0}


def row(condition: str = BASELINE, seed: int = 0) -> Run:
    return Run(condition, seed, [60, 120], [0.5, 0.7], [0.1, 0.0], [2.0, 2.0], AFTER, 1e-6, 1.0, 1.0, 2.0)


class Played:
    """Plays every job at once, two at a time, the one that was given last first."""

    def __init__(self, fail: str = "") -> None:
        self.places = 2
        self.given: list[Job] = []
        self._under_way: list[Job] = []
        self._fail = fail

    def give(self, job: Job) -> None:
        self.given.append(job)
        self._under_way.append(job)
        assert len(self._under_way) <= self.places

    def take(self) -> Row:
        job = self._under_way.pop()
        if job.condition is None:
            return replace(START, way=job.way)
        if job.condition.name == self._fail:
            raise ReplRLError("a worker failed")
        rate = job.learning_rate or 0.0
        # With a rate of its own the baseline learns best at the highest, and every other condition at the lowest.
        level = rate if job.condition.name == BASELINE else -rate
        return replace(row(job.condition.name, job.seed), learning_rate=rate, solve=[0.5, 0.6 + level])

    @contextmanager
    def opened(self, count: int, settings: Settings, out: Path) -> Iterator["Played"]:
        yield self


def test_every_cell_is_there_or_is_the_same_as_another_one() -> None:
    cells = {f"{estimator}/{shaping}" for estimator in ESTIMATORS for shaping in REPORTED_SHAPINGS}
    others = {condition.name for condition in (*MERGED, *ERRORS, *AGED)}
    assert {c.name for c in CONDITIONS} == cells - set(SAME_AS) | others | {"fenced"}
    assert len(CONDITIONS) == len({c.name for c in CONDITIONS}) == 33


@pytest.mark.parametrize("condition", [c for c in CONDITIONS if not c.removed], ids=lambda condition: condition.name)
def test_every_condition_can_be_trained(condition: Condition) -> None:
    config = trainer_config(condition, Settings())
    assert (config.max_staleness_steps, config.importance_sampling) == (condition.ahead, condition.importance)
    credit = build_credit_config(config)
    assert credit.reward_table == condition.rewards
    assert (len(credit.extra_rewards), credit.potential is not None) == (
        len(condition.line_rewards),
        bool(condition.potentials),
    )


@pytest.mark.parametrize("name", ["errors/first", "errors/potential", "errors/exception"])
def test_a_single_error_costs_its_line_as_much_in_every_way_as_in_the_default_preset(name: str) -> None:
    """One of two rollouts has an error; both failed, so that nothing else is credited."""
    group = [
        asyncio.run(world([line, "submit_final_answer(41)\n"]).collect([TASK]))[0] for line in ("1 / 0\n", "6 * 7\n")
    ]

    def first(condition: str) -> float:
        (found,) = conditions([condition])
        credit = build_credit_config(trainer_config(found, Settings()))
        rows = compute_group_advantages(Group(tuple(build_group_entry(t, credit) for t in group)), credit)
        assert rows[1] == (0.0, 0.0)
        return rows[0][0]

    assert first(name) == pytest.approx(first("two_stream/penalty"))
    assert first(name) == pytest.approx(-FIXED_PENALTY)
    assert first("errors/syntax") == 0.0


@pytest.mark.parametrize("name", sorted(SAME_AS))
def test_a_cell_that_is_left_out_gives_the_advantages_of_the_one_that_stands_for_it(name: str) -> None:
    # Two rollouts with an error and a line that ran each, one of which solved its task.
    group = (0.0, 1.0)

    def advantages(cell: str) -> object:
        method, shaping = cell.split("/")
        table = SHAPINGS.get(shaping, RewardTable(ok=0.1))
        penalty, bonus = table.exception, table.ok
        rows = tuple((penalty, bonus * outcome, 0.0) for outcome in group)
        return load_estimator(method)(GroupRewards.from_rows(group, rows))

    assert advantages(name) == advantages(SAME_AS[name])


def test_a_condition_that_this_version_cannot_train_is_refused_with_those_that_it_can(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path, Settings(tokens=100), [BASELINE, "errors/spared", "errors/first"], seeds=2)
    with pytest.raises(ConfigError, match=r"'errors/spared'; .*--conditions outcome/none errors/first"):
        run_experiment(experiment, lambda _: None, Played().opened)


def test_conditions_are_chosen_by_name_in_their_own_order() -> None:
    assert [c.name for c in conditions(["fenced", "state_anchor/penalty", BASELINE])] == [
        BASELINE,
        "state_anchor/penalty",
        "fenced",
    ]
    assert conditions() == CONDITIONS
    with pytest.raises(ConfigError, match="choose among"):
        conditions(["nonsense"])
    with pytest.raises(ConfigError, match=f"same as {BASELINE}"):
        conditions(["outcome/gated"])


def test_seeds_are_played_one_after_the_other_and_starts_first() -> None:
    chosen = conditions([BASELINE, "fenced"])
    order = [(job.way, job.condition and job.condition.name, job.seed) for job in jobs(chosen, range(2), [])]
    runs = [(way, name, seed) for seed in (0, 1) for way, name in (("lines", BASELINE), ("fenced", "fenced"))]
    assert order == [("fenced", None, 0), ("lines", None, 0), *runs]


def test_what_is_done_is_not_played_again() -> None:
    done: list[Row] = [START, row(seed=0), row("state_anchor/penalty", 1)]
    left = jobs(conditions([BASELINE, "state_anchor/penalty"]), range(2), done)
    assert [(job.condition and job.condition.name, job.seed) for job in left] == [
        ("state_anchor/penalty", 0),
        (BASELINE, 1),
    ]


def test_fenced_runs_wait_for_their_policy_while_others_overtake_them() -> None:
    players, kept = Played(), list[Row]()
    play_all(jobs(conditions(["fenced", BASELINE]), range(1), []), players, kept.append)
    order = [(job.way, job.condition is not None) for job in players.given]
    assert order == [("fenced", False), ("lines", False), ("lines", True), ("fenced", True)]
    assert len(kept) == 4
    alone = Played()
    play_all(jobs(conditions(["fenced"]), range(2), []), alone, kept.append)
    assert [job.condition is None for job in alone.given] == [True, False, False]


def test_an_experiment_that_broke_off_goes_on_where_it_stopped(tmp_path: Path) -> None:
    experiment = Experiment(
        tmp_path, Settings(tokens=100), [BASELINE, "process/penalty", "state_anchor/penalty"], seeds=2
    )
    with pytest.raises(ReplRLError):
        run_experiment(experiment, lambda _: None, Played(fail="state_anchor/penalty").opened)
    before = len((tmp_path / "rows.jsonl").read_text().splitlines())
    again, told = Played(), list[str]()
    report = run_experiment(experiment, told.append, again.opened)
    assert before + len(again.given) == 1 + 1 + 6
    assert "left" in told[-1]
    assert told[-1].startswith(f"  {len(again.given)}/{len(again.given)}")
    nobody = Played()
    assert run_experiment(experiment, told.append, nobody.opened) == report
    assert nobody.given == []
    with pytest.raises(ConfigError, match=r"settings.tokens \(100, here 200\)"):
        run_experiment(replace(experiment, settings=Settings(tokens=200)), told.append, nobody.opened)


def test_rates_are_chosen_by_one_rule_on_seeds_that_no_report_holds(tmp_path: Path) -> None:
    settings = Settings(tokens=100, rates=(0.1, 0.2, 0.3))
    experiment = Experiment(tmp_path, settings, [BASELINE, "state_anchor/penalty"], seeds=2)
    players, told = Played(), list[str]()
    report = run_experiment(experiment, told.append, players.opened)
    tried = [job for job in players.given if job.condition and job.tuning]
    assert len(tried) == len(TUNING) * 3 * 2
    (chosen,) = (line for line in told if line.startswith("learning rates: "))
    assert "outcome/none 0.3" in chosen
    assert "state_anchor/penalty 0.1" in chosen
    rows = report["rows"]
    assert isinstance(rows, list)
    found = {(r["condition"], r["seed"], r["learning_rate"]) for r in rows if r["kind"] == "run"}
    assert found == {
        (BASELINE, 0, 0.3),
        (BASELINE, 1, 0.3),
        ("state_anchor/penalty", 0, 0.1),
        ("state_anchor/penalty", 1, 0.1),
    }
    nobody = Played()
    assert run_experiment(experiment, told.append, nobody.opened) == report
    assert nobody.given == []


def test_tuning_that_broke_off_goes_on_and_of_equal_rates_the_lowest_is_chosen() -> None:
    chosen = conditions([BASELINE])
    done: list[Row] = [START, *(replace(row(seed=TUNING[0]), learning_rate=rate) for rate in (0.2, 0.1))]
    left = tuning_jobs(chosen, [0.2, 0.1], done)
    assert [(job.seed, job.learning_rate) for job in left] == [(TUNING[1], 0.2), (TUNING[1], 0.1)]
    assert chosen_rates([r for r in done if isinstance(r, Run)], [0.2, 0.1], 100) == {BASELINE: 0.1}


def test_one_cell_is_repeated_with_its_own_seed(tmp_path: Path) -> None:
    players = Played()
    experiment = Experiment(tmp_path, Settings(tokens=100), [BASELINE], seeds=1, first_seed=3)
    report = run_experiment(experiment, lambda _: None, players.opened)
    assert [job.seed for job in players.given if job.condition] == [3]
    rows = report["rows"]
    assert isinstance(rows, list)
    assert [r["seed"] for r in rows if r["kind"] == "run"] == [3]


def test_how_small_a_difference_is_detected_is_said_before_anything_runs(tmp_path: Path) -> None:
    told: list[str] = []
    experiment = Experiment(tmp_path, Settings(tokens=100), [BASELINE, "state_anchor/penalty"], seeds=8)
    report = run_experiment(experiment, told.append, Played().opened)
    assert told[0].startswith("8 seeds detect a difference of 2.5 points (paired t, two-sided 5%, power 80%)")
    assert isinstance(report["power"], dict)
    assert report["power"]["comparisons"] == 1
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    again = replace(experiment, earlier=file).power
    assert again.source == "that of report.json"
    assert again.spread == pytest.approx(0.0)
    file.write_text("{}")
    with pytest.raises(ConfigError, match="earlier"):
        assert replace(experiment, earlier=file).power
    assert "spread between seeds 3.4 points, as was asked for" in str(replace(experiment, spread=0.034).power)
    with pytest.raises(ConfigError, match="spread is 0; it must be above 0"):
        replace(experiment, spread=0)
    assert "no difference can be told" in str(replace(experiment, seeds=1).power)


def test_a_report_is_about_what_was_asked_for_although_more_was_played(tmp_path: Path) -> None:
    settings = Settings(tokens=100)
    run_experiment(
        Experiment(tmp_path, settings, [BASELINE, "state_anchor/penalty"], seeds=2), lambda _: None, Played().opened
    )
    report = run_experiment(Experiment(tmp_path, settings, [BASELINE], seeds=1), lambda _: None, Played().opened)
    rows = report["rows"]
    assert isinstance(rows, list)
    assert [r.get("condition") for r in rows] == [None, BASELINE]


def test_runs_with_other_settings_are_never_mixed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = RowFile(path, header(Settings(), BASE))
    file.add(START)
    file.add(row())
    assert RowFile(path, header(Settings(), BASE)).rows == [START, row()]
    with pytest.raises(ConfigError, match=r"another fingerprint \(.*\) and settings\."):
        RowFile(path, header(Settings(tokens=1), BASE))
    with pytest.raises(ConfigError, match="another policy"):
        RowFile(path, {**header(Settings(), BASE), "policy": "other"})
    path.write_text("hello\n")
    with pytest.raises(ConfigError, match="something else"):
        RowFile(path, header(Settings(), BASE))


def test_a_row_survives_json_and_nonsense_is_named() -> None:
    assert [parse(json.dumps(record(r))) for r in (START, row())] == [START, row()]
    for text in ("{", "[]", '{"kind": "other"}', '{"kind": "run"}'):
        with pytest.raises(ConfigError, match="each row is"):
            parse(text)


def test_what_cannot_be_played_is_refused() -> None:
    with pytest.raises(ConfigError, match="group_size"):
        Settings(group_size=1)
    with pytest.raises(ConfigError, match="learning_rate"):
        Settings(learning_rate=0.0)
    for rates in ((1e-3,), (1e-3, -1e-3), (1e-3, 1e-3)):
        with pytest.raises(ConfigError, match="rates"):
            Settings(rates=rates)
    with pytest.raises(ConfigError, match="seeds"):
        Experiment(Path("out"), seeds=0)
    with pytest.raises(ConfigError, match="seeds is 1000; from 1000 on they choose learning rates"):
        Experiment(Path("out"), first_seed=999, seeds=2)


def test_a_worker_that_failed_or_is_gone_ends_the_experiment_with_its_reason() -> None:
    context = get_context("spawn")
    given: Queue[Job | None] = context.Queue()
    made: Queue[Row | str] = context.Queue()
    players = Processes([context.Process()], given, made)
    made.put(row())
    made.put("no memory is left")
    assert players.take() == row()
    with pytest.raises(ReplRLError, match="no memory is left"):
        players.take()
    with pytest.raises(ReplRLError, match="process is gone"):
        players.take()

"""The shipped regimes: each can be read and played, and what they are to show they can."""

import random
from dataclasses import asdict, fields, replace

import pytest

from benchmarks.cli import CreditBenchConfig
from benchmarks.credit import regime_report as regimes
from benchmarks.credit.conditions import AGED, BASELINE, BEGINNINGS, conditions
from benchmarks.credit.experiment import Experiment
from benchmarks.credit.findings import findings
from benchmarks.credit.power import smallest_difference
from benchmarks.credit.settings import REGIMES, Settings
from benchmarks.credit.starting_policies import DEMONSTRATIONS_A_STEP, FAILING, MOST_FAILURES, failing_plan
from repl_rl.errors import ConfigError
from repl_rl.settings.argument_parser import parse
from repl_rl.sft.demonstrations import ECHO
from repl_rl.tasks import BUILTIN, Split, draw_problem
from repl_rl.utils.package_data import find_asset

NAMES = sorted(file.stem for file in find_asset(REGIMES).glob("*.toml"))
AGAIN = [name for name in NAMES if name.endswith("_again")]


def regime(name: str, *flags: str) -> CreditBenchConfig:
    return parse(CreditBenchConfig, "bench credit", ["--regime", name, *flags], find_asset(REGIMES), "regime")


@pytest.mark.parametrize("name", NAMES)
def test_a_regime_is_named_as_its_file_and_compares_six_conditions_with_six_seeds_at_least(name: str) -> None:
    found = regime(name)
    assert found.regime == name
    chosen = [condition.name for condition in conditions(found.conditions)]
    assert BASELINE in chosen
    few, stale = found.start == "shown", name.startswith("stale")  # a real model: a check of signs
    assert len(chosen) == len(found.conditions) >= (2 if name in AGAIN else 3 if stale else 4 if few else 6)
    assert found.seeds >= (3 if few else 4 if stale else 6)
    assert (found.agreement_tokens > 0) is not stale
    settings = Settings(**{field.name: getattr(found, field.name) for field in fields(Settings)})
    assert Experiment(found.out, settings, found.conditions, found.seeds).power.smallest is not None


def test_a_model_is_shown_as_much_by_lines_as_by_blocks_and_may_write_as_much_in_either_way() -> None:
    found = regime("pretrained")
    assert {"fenced", BASELINE} <= set(found.conditions)
    assert found.transcripts == 3
    assert len(found.families) == 2
    limits = BEGINNINGS[found.start].limits
    assert len({limit.max_lines * limit.max_line_tokens for limit in limits.values()}) == 1
    assert found.shown_steps * DEMONSTRATIONS_A_STEP == 256, "the number in benchmarks/results/credit.md"


@pytest.mark.parametrize("name", AGAIN)
def test_a_finding_is_asked_again_on_seeds_of_its_own_that_detect_three_points_by_the_spread_as_measured(
    name: str,
) -> None:
    first_name = name.removesuffix("_again")
    first, again, published = regime(first_name), regime(name), regimes.PUBLISHED.reports[first_name]
    assert again.conditions == (BASELINE, *(c for c in first.conditions if c in findings(published)))
    played = ({*range(found.first_seed, found.first_seed + found.seeds)} for found in (first, again))
    assert not set.intersection(*played)
    assert again.spread == pytest.approx(published["figures"]["spread"], abs=5e-5)
    assert smallest_difference(published["figures"]["spread"], again.seeds) <= 0.03
    of_seeds = {"regime", "conditions", "seeds", "first_seed", "spread"}
    kept = [{k: v for k, v in asdict(found).items() if k not in of_seeds} for found in (first, again)]
    assert kept[0] == kept[1], "nothing else is changed"


def test_two_regimes_at_least_are_planned_to_detect_three_points() -> None:
    powers = [regimes.planned(name)[1].power for name in NAMES]
    assert sum(p.smallest is not None and p.smallest <= 0.03 for p in powers) >= 2
    assert {name: regimes.planned(name)[1].power.spread for name in AGAIN} == {n: regime(n).spread for n in AGAIN}


def test_the_age_of_rollouts_is_tried_with_every_correction_and_changes_nothing_else() -> None:
    assert set(regime("stale").conditions) == {BASELINE, *(condition.name for condition in AGED)}
    assert {(c.ahead, c.importance) for c in AGED} == {
        (ahead, importance) for ahead in (1, 2, 4, 8) for importance in ("token_truncate", "token_mask", "token_band")
    }
    (fresh,) = conditions([BASELINE])
    assert {replace(c, name=BASELINE, ahead=0, importance=fresh.importance) for c in AGED} == {fresh}


def test_the_long_run_about_the_age_of_rollouts_has_leads_far_apart_as_they_are_by_default() -> None:
    assert set(regime("stale_long").conditions) == {BASELINE, *(f"ahead_{n}/token_truncate" for n in (1, 4, 8))}


def test_a_flag_wins_over_the_regime_and_an_unknown_one_is_named_with_those_that_are() -> None:
    found = regime("noise", "--seeds", "1", "--first-seed", "3", "--conditions", BASELINE)
    assert (found.seeds, found.first_seed, found.conditions) == (1, 3, (BASELINE,))
    assert found.prompts_per_step == regime("noise").prompts_per_step
    with pytest.raises(ConfigError, match=rf"regime is 'loud'; choose {' or '.join(NAMES)}"):
        regime("loud")


def test_today_is_the_batch_and_the_rate_of_the_defaults() -> None:
    found, default = regime("today"), Settings()
    for name in ("tokens", "prompts_per_step", "group_size", "learning_rate", "rates", "start"):
        assert getattr(found, name) == getattr(default, name)


def test_the_demonstrations_of_the_failing_policy_fail_about_as_often_as_they_are_meant_to() -> None:
    rng, failed, lines = random.Random(0), 0, 0
    for number in range(2000):
        drawn = draw_problem(BUILTIN["quickstart"][number % 3], rng, Split.TRAIN)
        planned = failing_plan(drawn, rng).lines
        wrong = [line for line in planned if line.endswith(")\n") and line.count(")") > line.count("(")]
        wrong += [line for line in planned if line.startswith("result")]
        failed, lines = failed + len(wrong), lines + len(planned)
        asks = [at for at, line in enumerate(planned) if ECHO in line]
        assert all(planned[at - 1] not in wrong for at in asks), "an answer copies what was printed, not a traceback"
        assert planned[-1] not in wrong
    # A line that fails too often is written right in the end.
    longest = FAILING * (1 - FAILING**MOST_FAILURES) / (1 - FAILING)
    assert failed / lines == pytest.approx(longest / (1 + longest), abs=0.02)

"""The figures of survival.md in docs/ and in results/ come from its benchmarks, slopes with their intervals."""

import json
import sys
from dataclasses import asdict, replace
from subprocess import PIPE, Popen

import pytest

from benchmarks.faults import checkpoint_cost as states
from benchmarks.faults import interrupted, soak

NOTHING = "Nothing is published yet.\n"


def test_the_page_holds_what_was_measured_or_says_that_nothing_was() -> None:
    for maker in (interrupted, soak, states):
        found = maker.FIGURES.exists()
        assert maker.PAGE.text == (maker.block(json.loads(maker.FIGURES.read_text())) if found else NOTHING)
        assert maker.SUMMARY.text == (maker.summary(json.loads(maker.FIGURES.read_text())) if found else NOTHING)


def test_a_slope_is_per_thousand_rollouts_and_its_interval_holds_a_figure_that_does_not_grow() -> None:
    empty = soak.Look(0, 0.0, 0.0, 9, 2, 0, 0)
    looks = [replace(empty, rollouts=250 * n, own_mib=100 + 0.5 * n, below_mib=50 + (-1) ** n) for n in range(1, 41)]
    assert soak.slope(looks, "own_mib") == pytest.approx((2.0, 0.0))
    grows, half = soak.slope(looks, "below_mib")
    assert abs(grows) < half < 1
    assert soak.slope(looks, "descriptors") == (0.0, 0.0)


def test_a_row_of_the_soak_tells_growth_and_what_is_left() -> None:
    slopes = dict.fromkeys(("own_mib", "below_mib", "descriptors"), (0.25, 0.5))
    left = {"descriptors": 0, "processes": 1, "containers": 0, "shared": 0}
    looks = [{"own_mib": mib} for mib in (10.0, 12.0, 12.5, 13.0, 13.25, 13.25, 13.25, 13.5)]
    report = {"engine": "scripted", "sandbox": "local", "rollouts": 200, "slopes": slopes, "left": left, "looks": looks}
    row, _, grown = soak.block([report]).splitlines()[-3:]
    assert row == "| scripted, local, 200 | +0.25 ± 0.50 | +0.25 ± 0.50 | +0.25 ± 0.50 | 0, 1, 0, 0 |"
    assert grown == "Growth of the main process per quarter, scripted on local: 2.00, 1.00, 0.25, 0.25 MiB."
    named = {**report, "left_named": ["-c from multiprocessing.resource_tracker import main;main(7)"]}
    assert soak.block([named]).splitlines()[-1] == (
        "Left by scripted on local until the process ends: "
        "`-c from multiprocessing.resource_tracker import main;main(7)`."
    )


def test_what_is_left_is_called_by_its_name() -> None:
    before = soak.named()
    with Popen([sys.executable, "-c", "input('a child')"], stdin=PIPE) as child:
        found = soak.named()
        assert found[f"process {child.pid}"] == "-c input('a child')"
        new = [what for name, what in found.items() if name not in before]
        child.communicate(b"\n")
    assert sorted(new) == ["-c input('a child')", "pipe"]


def test_the_cost_of_states_is_the_median_of_paired_legs() -> None:
    step_s = {"on": [2.0, 2.2, 2.1], "off": [2.0, 2.0, 2.0]}
    start_s = {"fresh": [10.0, 12.0], "resumed": [11.0, 13.2]}
    found = {"engine": "transformers", "parameters": 25e6, "leg_s": 300.0, "seconds": 60.0, "states": 12}
    text = states.block({**found, "step_s": step_s, "start_s": start_s, "cpus": 2, "load_average": 0.5})
    assert "| 2.10 | 2.00 | 1.050 (1.000 to 1.100) |" in text
    assert "11.0 for\na new run, 12.1 for a resumed one (ratio 1.10)." in text


def test_interrupted_trainings_are_told_as_a_group_beside_undisturbed_ones() -> None:
    rates = {"undisturbed": [0.9, 0.92], "interrupted": [0.89, 0.93]}
    told = [
        asdict(
            interrupted.Told(
                n, ("SIGTERM", "SIGKILL") if stops else (), (3,) if stops else (), rate, 0.97, 1e-5, 2e-6, 0
            )
        )
        for n in range(2)
        for stops, rate in ((False, rates["undisturbed"][n]), (True, rates["interrupted"][n]))
    ]
    text = interrupted.block({"told": told})
    assert "| undisturbed | 90.0%, 92.0% | 91.0% | 97.0% | 1.0e-05 |" in text
    assert "| interrupted | 89.0%, 93.0% | 91.0% | 97.0% | 1.0e-05 |" in text
    assert "Stopped 4 times (SIGTERM 2, SIGKILL 2)" in text
    assert "in\n100% of cases" in text


def test_groups_that_could_not_differ_more_are_as_rare_as_their_orders() -> None:
    assert interrupted.chance([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]) == 2 / 20
    assert interrupted.chance([1.0, 1.0], [1.0, 1.0]) == 1.0

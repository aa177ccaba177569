"""`bench fleet`: a real cluster in small, and what its figures are held to."""

import json
from pathlib import Path

import pytest

from benchmarks.fleet import Figures, block, merged
from repl_rl.cli import main
from repl_rl.lab.fleet import ideal_s


def test_a_fleet_that_costs_nothing_takes_as_long_as_its_schedule() -> None:
    assert ideal_s([4, 4, 4, 4], [3.0, 1.0, 1.0, 1.0], nodes=1, places=8) == pytest.approx(3.0)
    assert ideal_s([4, 4, 4, 4], [1.0] * 4, nodes=2, places=4) == pytest.approx(2.0)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_small_fleet_is_measured_and_published(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    small = ("--nodes", "1", "2", "--in-flight", "16", "--rollout-s", "0.2", "--weights-mb", "1")
    assert main(["bench", "fleet", *small, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert [(row["nodes"], row["rollouts"]) for row in found["fleets"]] == [(1, 64), (2, 128)]
    assert all(0 < row["efficiency"] <= 1 and row["nodes_lost"] == 0 for row in found["fleets"])
    assert block(merged([Figures(**found)] * 2)).count("\n") == 8


def test_figures_of_two_machines_are_not_published_as_those_of_one() -> None:
    with pytest.raises(ValueError, match="different machines"):
        merged([Figures(cpus, 8, 8, []) for cpus in (2, 4)])


def test_figures_that_a_lost_node_spoiled_are_not_published() -> None:
    with pytest.raises(ValueError, match="nodes were lost"):
        merged([Figures(2, 8, 8, [{"nodes": 4, "nodes_lost": 1}])])


def test_without_figures_nothing_is_published() -> None:
    with pytest.raises(ValueError, match="bench fleet --json"):
        merged([])

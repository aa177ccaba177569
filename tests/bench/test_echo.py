"""The experiment on observed tokens: what is played, what is not played again, and what its figures are made of."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from repl_rl.errors import ConfigError
from repl_rl.lab.credit.rows import Run, Start
from repl_rl.lab.echo import EchoConfig, console_nats, run_echo
from tests.trainer.policies import SampledSource, tiny_model

LEVEL = {0.0: 0.4, 0.1: 0.5, 0.5: 0.3}


def figures(level: float) -> Mapping[str, float]:
    names = ("solve_rate", "greedy", "line_error_rate", "rollout_tokens", "console_nats")
    return dict.fromkeys(names, level)


class Made:
    """Runs of numbers that follow from weight and seed."""

    start = Start("lines", figures(0.2), 1.0)

    def __init__(self) -> None:
        self.played: list[tuple[float, int]] = []

    def run(self, weight: float, seed: int) -> Run:
        self.played.append((weight, seed))
        level = LEVEL[weight] + 0.01 * seed * (1 + weight)
        solve = [level, level + 0.1]
        return Run(f"{weight:g}", seed, [600, 1200], solve, [0.1] * 2, [2.0] * 2, figures(level), 1e-6, 1.0, 1.0, 9.0)


def play(config: EchoConfig) -> tuple[Made, dict[str, object]]:
    made = Made()

    @contextmanager
    def player(_: EchoConfig) -> Iterator[Made]:
        yield made

    return made, run_echo(config, lambda line: None, player)


def test_seeds_come_one_after_the_other_and_what_was_played_is_not_played_again(tmp_path: Path) -> None:
    config = EchoConfig(tokens=1000, seeds=1, out=tmp_path)
    first, _ = play(config)
    assert first.played == [(0.0, 0), (0.1, 0)]
    more, report = play(replace(config, seeds=2, weights=(0.0, 0.1, 0.5)))
    assert more.played == [(0.5, 0), (0.0, 1), (0.1, 1), (0.5, 1)]
    none, again = play(replace(config, seeds=2, weights=(0.0, 0.1, 0.5)))
    assert none.played == []
    assert again == report


def test_differences_are_paired_by_seed_and_to_no_weight(tmp_path: Path) -> None:
    _, report = play(EchoConfig(tokens=1000, seeds=3, weights=(0.0, 0.1, 0.5), out=tmp_path))
    found = json.loads(json.dumps(report))["weights"]
    assert found["0"]["difference"]["solve_rate"]["value"] == 0.0
    assert found["0.1"]["difference"]["solve_rate"]["value"] == pytest.approx(0.101)
    assert found["0.5"]["difference"]["solve_rate"]["high"] < 0
    assert found["0.1"]["mean"]["train_solve_rate"]["value"] == pytest.approx(0.511 + 0.04)


def test_runs_of_other_settings_are_never_mixed_in(tmp_path: Path) -> None:
    config = EchoConfig(tokens=1000, seeds=1, out=tmp_path)
    play(config)
    with pytest.raises(ConfigError, match="another settings"):
        play(replace(config, tokens=2000))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: EchoConfig(weights=(0.0, -0.1)), "observation_weight is -0.1"),
    (lambda: EchoConfig(weights=()), "weights is"),
    (lambda: EchoConfig(weights=(0.1, 0.1)), "none twice"),
    (lambda: EchoConfig(seeds=0), "seeds is 0"),
    (lambda: EchoConfig(tokens=0), "tokens is 0"),
])  # fmt: skip
def test_what_cannot_be_played_is_refused(make: Callable[[], EchoConfig], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_console_is_scored_over_all_logits_without_ids_that_are_never_sampled() -> None:
    model, never = tiny_model(), frozenset({5, 6, 7})
    rollouts = SampledSource(tiny_model()).collect(["a", "b", "c"], 0)
    total, count = 0.0, 0
    with torch.no_grad():
        for t in rollouts:
            ids = torch.tensor([[*t.prompt.token_ids, *t.completion_ids]])
            free = model(ids).logits[0].index_fill(-1, torch.tensor(sorted(never)), -torch.inf).log_softmax(-1)
            start = len(t.prompt.token_ids)
            for at, (token, sampled) in enumerate(zip(t.completion_ids, t.loss_mask, strict=True)):
                if not sampled and token not in never:
                    total, count = total - free[start + at - 1, token].item(), count + 1
    assert console_nats(model, rollouts, never) == pytest.approx(total / count, rel=1e-5)
    assert console_nats(model, [], never) == 0.0

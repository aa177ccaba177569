"""Settings that name functions with weights or options: flags, files, Python and the texts of older versions."""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl import RolloutConfig
from repl_rl.cli.train import TrainConfig
from repl_rl.errors import ConfigError
from repl_rl.runs.run_folder import check_same_settings
from repl_rl.settings.argument_parser import dump_toml, parse, parse_with_sources
from repl_rl.settings.function_tables import format_table, read_option_table, read_weight_table
from repl_rl.settings.migrate_run_settings import rename_recorded

NAMES = st.from_regex(r"[a-z_]{1,6}(\.[a-z_]{1,6})?:[a-z_]{1,6}|[a-z_]{1,8}", fullmatch=True)
WEIGHTS = st.dictionaries(NAMES, st.floats(-1e6, 1e6))
OPTION_NAMES = st.from_regex(r"[a-z][a-z_]{0,5}", fullmatch=True)
OPTIONS = st.dictionaries(NAMES, st.dictionaries(OPTION_NAMES, st.integers() | st.booleans() | st.text()))
CONFIG: Callable[..., RolloutConfig] = RolloutConfig
"""The class with arguments of older versions, which its annotations no longer have."""


def parsed(*flags: str) -> TrainConfig:
    return parse(TrainConfig, "train", flags)


def from_file(folder: Path, text: str, *flags: str) -> TrainConfig:
    file = folder / "settings.toml"
    file.write_text(text)
    return parsed("--config", str(file), *flags)


def test_flags_give_names_alone_or_with_weights_and_options() -> None:
    assert parsed("--judges", "task", "mine:polite").judges == {"task": 1.0, "mine:polite": 1.0}
    config = parsed("--judges.task", "1", "--judges.mine:polite", "0.2")
    assert list(config.judges.items()) == [("task", 1.0), ("mine:polite", 0.2)]
    flags = ("--host-functions", "rollout", "--host-functions.llm-query.max-tokens", "64")
    assert parsed(*flags).host_functions == {"rollout": {}, "llm_query": {"max_tokens": 64}}
    tools = parsed("--host-functions.a.tools:search.max-calls", "8").host_functions
    assert tools == {"a.tools:search": {"max_calls": 8}}, "the module of a function may have dots"
    assert parsed("--trainer.line-rewards.first-error", "-0.6").trainer.line_rewards == {"first_error": -0.6}


def test_flags_add_to_the_table_of_a_file_and_names_alone_replace_it(tmp_path: Path) -> None:
    text = '[judges]\ntask = 2\n[trainer.line_rewards]\n"a:b" = 1'
    assert from_file(tmp_path, text, "--judges.mine:f", "0.5").judges == {"task": 2.0, "mine:f": 0.5}
    assert from_file(tmp_path, text, "--judges.task", "3").judges == {"task": 3.0}
    assert from_file(tmp_path, text, "--judges", "mine:f").judges == {"mine:f": 1.0}
    assert from_file(tmp_path, text).trainer.line_rewards == {"a:b": 1.0}


def test_a_table_that_a_flag_gives_counts_as_given() -> None:
    for flags in (["--judges", "task"], ["--judges.task", "1"]):
        assert parse_with_sources(TrainConfig, "train", flags).flags == {"judges"}


@given(WEIGHTS, OPTIONS)
def test_a_recorded_table_is_read_as_it_was(
    weights: Mapping[str, float], options: Mapping[str, Mapping[str, object]]
) -> None:
    text = format_table("judges", weights) + format_table("host_functions", options)
    recorded = tomllib.loads(text)
    assert read_weight_table("judges", recorded.get("judges", {})) == weights
    found = {name: {} if value is True else value for name, value in recorded.get("host_functions", {}).items()}
    assert read_option_table("host_functions", found) == options


def test_settings_are_written_and_read_back(tmp_path: Path) -> None:
    config = parsed(
        *("--judges", "mine:f", "task", "--host-functions", "rollout"),
        *("--host-functions.mine:search.max-calls", "3", "--trainer.potentials.error-potential", "0.6"),
    )
    assert from_file(tmp_path, dump_toml(config)) == config


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--judges",), "option is '--judges'; give a name after it"),
        (("--judges.mine:f", "much"), "judges.mine:f is 'much'; give its weight, a finite number"),
        (("--judges.mine:f", "true"), "judges.mine:f is True; give its weight"),
        (("--judges.mine:f", "nan"), "judges.mine:f is nan; give its weight, a finite number"),
        (("--judges.mine f", "1"), "key is '--judges.mine f'; name it with letters"),
        (("--host-functions.llm_query", "3"), "host_functions.llm_query is '3'; give true, or its options"),
    ],
)
def test_what_is_no_weight_or_option_is_refused(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parsed(*flags)


OLD = (
    ("judge", "judges", "task + 0.2*mine:f", {"task": 1.0, "mine:f": 0.2}),
    ("group_judge", "group_judges", "0.5*mine:f", {"mine:f": 0.5}),
    (
        "host_functions",
        "host_functions",
        "llm_query(train=True, n=3),a:b",
        {"llm_query": {"train": True, "n": 3}, "a:b": {}},
    ),
)


@pytest.mark.parametrize(("old", "new", "text", "table"), OLD)
def test_texts_of_older_versions_are_read_with_a_warning(
    old: str, new: str, text: str, table: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ways: list[Callable[[], RolloutConfig]] = [
        lambda: parsed(f"--{old.replace('_', '-')}", text),
        lambda: from_file(tmp_path, f"{old} = {text!r}"),
        lambda: CONFIG(**{new: text}),
    ]
    for way in ways:
        assert getattr(way(), new) == table
        assert f"{new} is a table now" in caplog.text
        caplog.clear()


def test_reward_functions_of_older_versions_are_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = '[trainer]\nline_rewards = ["first_error=0.6", "a:b"]\npotential = "error_potential=0.5"'
    config = from_file(tmp_path, text)
    assert config.trainer.line_rewards == {"first_error": 0.6, "a:b": 1.0}
    assert config.trainer.potentials == {"error_potential": 0.5}
    assert "trainer.line_rewards is a table now" in caplog.text
    assert "trainer.potential in" in caplog.text


def test_a_function_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="name each function once"):
        CONFIG(judges="task + 2*task")
    with pytest.raises(ConfigError, match="name each function once"):
        CONFIG(host_functions=("rollout", "rollout"))


def test_a_run_of_an_older_version_resumes_with_the_same_functions(tmp_path: Path) -> None:
    config = parsed("--judges", "mine:f", "--trainer.line-rewards.first-error", "0.6")
    now = dump_toml(config)
    # Version 0.3 wrote texts and a list in place of these tables.
    tables = '\n[judges]\n"mine:f" = 1.0\n', "\n[trainer.line_rewards]\nfirst_error = 0.6\n"
    old = now.replace(tables[0], "").replace(tables[1], "")
    old = old.replace("[trainer]\n", '[trainer]\nline_rewards = ["first_error=0.6"]\n')
    (tmp_path / "config.toml").write_text(f'judge = "mine:f"\nhost_functions = ""\n{old}')
    check_same_settings(tmp_path, now)
    with pytest.raises(ConfigError, match=r"judges\.mine:f is 2\.0, the run's 1\.0"):
        check_same_settings(tmp_path, now.replace('"mine:f" = 1.0', '"mine:f" = 2.0'))


def test_judges_in_another_order_are_another_setting(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(dump_toml(parsed("--judges", "task", "mine:f")))
    with pytest.raises(ConfigError, match="the first of judges is 'mine:f', the run's 'task'"):
        check_same_settings(tmp_path, dump_toml(parsed("--judges", "mine:f", "task")))


def test_recorded_texts_are_tables_in_the_settings_of_a_run() -> None:
    nested = rename_recorded({"judge": "task + 2*a:b", "host_functions": "rollout", "trainer": {"line_rewards": []}})
    assert nested == {"judges": {"task": 1.0, "a:b": 2.0}, "host_functions": {"rollout": True}, "trainer": {}}
    dotted = rename_recorded({"group_judge": "0.5*a:b", "trainer.potential": "c:d", "trainer.steps": 3})
    assert dotted == {"group_judges.a:b": 0.5, "trainer.potentials.c:d": 1.0, "trainer.steps": 3}

"""Chat templates of strangers: that take no system message, that read the clock, that come to no end."""

import asyncio
import logging
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.errors import ConfigError
from repl_rl.rollout import RolloutSettings, chat_template
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.run_folder import check_same_settings
from repl_rl.runs.store import read_trajectories
from repl_rl.samplers.chat_format import ChatFormat, build_conversation
from repl_rl.settings.argument_parser import dump_toml, load_toml
from repl_rl.utils.package_data import find_asset
from repl_rl.utils.timeouts import call_with_time_limit
from tests.support.scripted_rollouts import TASK, world
from tests.support.tokenizers import merged_tokenizer

TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>\n{% endfor %}[assistant] "
REFUSING = {
    "Gemma": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + TURNS,
    "Mistral 7B v0.1": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{% endfor %}" + TURNS,
    "dropped": TURNS.replace("in messages", "in messages if m.role != 'system'"),
    "not looked for": "{% for m in messages %}{% if m.role == 'user' %}[user] {{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}[assistant] ",
    "in parts": "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    + TURNS.replace("m.content", "m.content[0].text"),
}


def renderer_with(template: str, now: datetime | None = None) -> Renderer:
    tokenizer = merged_tokenizer()
    tokenizer.chat_template = template
    return Renderer(tokenizer, now=now)


@pytest.mark.parametrize("kind", REFUSING)
def test_a_system_message_that_is_not_taken_goes_before_the_first_question(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    renderer = renderer_with(REFUSING[kind])
    for _ in range(2):
        prompt = ChatFormat(renderer).build_prompt(build_conversation("Be quick.", "6 * 7?"))
        assert prompt.text == "[user] Be quick.\n\n6 * 7?<|im_end|>\n[assistant] "
    shown = renderer.build_prompt("6 * 7?", "chat").text
    assert shown.count("[user]") == 1
    assert shown.index("\n\n6 * 7?<|im_end|>") > 0
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "the chat template of byte-level takes no system message: its text goes before the first question"
    ]
    assert renderer.build_question_prompt("", "6 * 7?").text == "[user] 6 * 7?<|im_end|>\n[assistant] "


def test_a_system_message_that_is_taken_stays_one(caplog: pytest.LogCaptureFixture) -> None:
    assert (
        renderer_with(TURNS).build_question_prompt("S", "Q").text
        == "[system] S<|im_end|>\n[user] Q<|im_end|>\n[assistant] "
    )
    assert caplog.records == []


def test_a_template_that_refuses_everything_is_refused_as_before() -> None:
    with pytest.raises(ConfigError, match=r"never.; it refuses this conversation"):
        renderer_with("{{ raise_exception('never') }}").build_question_prompt("S", "Q")


def test_a_question_behind_a_system_text_spells_no_control_token() -> None:
    renderer = renderer_with(REFUSING["Gemma"])
    ids = renderer.build_question_prompt("S", "<|im_end|>").token_ids
    assert sum(i in renderer.eos_ids for i in ids) == 1


def test_rollouts_are_played_with_a_template_that_takes_no_system_message() -> None:
    plain = world(["submit_final_answer(42)\n"], renderer=renderer_with(REFUSING["Gemma"]))
    rollouts = replace(plain, settings=RolloutSettings("chat"))
    (t,) = asyncio.run(rollouts.collect([TASK]))
    assert t.outcome == 1.0


CLOCK = "{{ strftime_now('%d %b %Y %H:%M:%S.%f') }} " + TURNS


def model_with(template: str, folder: Path) -> Path:
    folder.mkdir()
    for file in find_asset("policies/quickstart").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_a_template_reads_one_time_as_long_as_it_lives() -> None:
    renderer = renderer_with(CLOCK)
    assert len({renderer.build_question_prompt("", "Q").text for _ in range(20)}) == 1
    then = datetime(2001, 2, 3, 4, 5, 6)
    assert (
        renderer_with(CLOCK, now=then)
        .build_question_prompt("", "Q")
        .text.startswith("03 Feb 2001 04:05:06.000000 [user]")
    )


def test_a_run_keeps_its_date_and_goes_on_with_it(tmp_path: Path) -> None:
    folder = model_with(CLOCK, tmp_path / "model")
    begun = RolloutConfig(model=str(folder), prompt="chat").resolve_prompt_settings()
    assert datetime.fromisoformat(begun.date) <= datetime.now()
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(dump_toml(replace(begun, date="2001-02-03T04:05:06")))
    recorded = RolloutConfig.from_run(run)
    assert recorded.load_renderer().build_question_prompt("", "Q").text.startswith("03 Feb 2001 04:05:06")
    resumed = RolloutConfig(model=str(folder), prompt="chat").resolve_prompt_settings(run / "config.toml")
    check_same_settings(run, dump_toml(resumed))
    assert resumed == recorded
    said = RolloutConfig(model=str(folder), prompt="chat", date="2020-01-01")
    assert said.resolve_prompt_settings(run / "config.toml").date == said.date
    with pytest.raises(ConfigError, match="date is '2020-01-01', the run's '2001-02-03T04:05:06'"):
        check_same_settings(run, dump_toml(said))


def test_a_run_whose_template_reads_no_clock_has_no_date(tmp_path: Path) -> None:
    usual = RolloutConfig()
    assert usual.resolve_prompt_settings().date == ""
    (tmp_path / "config.toml").write_text(dump_toml(usual).replace('date = ""\n', ""))
    check_same_settings(tmp_path, dump_toml(usual))
    with pytest.raises(ConfigError, match="date is 'today'; give one as 2026-11-27"):
        RolloutConfig(date="today")


def test_processes_that_train_together_must_be_told_one_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    folder = model_with(CLOCK, tmp_path / "model")
    assert main(["train", "--model", str(folder), "--prompt", "chat", "--out", str(tmp_path)]) == 2
    assert "processes that train together must agree; give a date" in capsys.readouterr().err


def test_a_training_has_one_prompt_for_a_task_and_its_date_in_its_settings(tmp_path: Path) -> None:
    folder = model_with(CLOCK, tmp_path / "model")
    sizes = ["--trainer.steps", "2", "--trainer.prompts-per-step", "2", "--trainer.group-size", "2"]
    few = ["--train-tasks", "2", "--eval-tasks", "1", "--concurrency", "2", "--rollout.max-lines", "1"]
    given = ["train", "--engine", "transformers", "--model", str(folder), "--prompt", "chat", "--sandbox", "local"]
    assert main([*given, *sizes, *few, "--out", str(tmp_path), "--name", "dated"]) == 0
    date = load_toml(tmp_path / "dated" / "config.toml")["date"]
    shown = datetime.fromisoformat(str(date)).strftime("%d %b %Y %H:%M:%S.%f")
    assert shown in RolloutConfig.from_run(tmp_path / "dated").load_renderer().build_question_prompt("", "Q").text
    played = list(read_trajectories(tmp_path / "dated" / "trajectories"))
    prompts = {trajectory.task_id: trajectory.prompt.text for trajectory in played}
    assert len(played) > len(prompts)
    assert all(t.prompt.text == prompts[t.task_id] and shown in t.prompt.text for t in played)


def test_transcripts_have_the_date_that_is_given_or_that_of_their_beginning(tmp_path: Path) -> None:
    folder = model_with(CLOCK, tmp_path / "model")
    flags = ["transcripts", "--from-tasks", "builtin:count", "--count", "2", "--sandbox", "inprocess"]
    flags += ["--prompt", "chat", "--model", str(folder), "--out"]
    assert main([*flags, str(tmp_path / "first"), "--date", "2001-02-03T04:05:06"]) == 0
    prompts = [t.prompt.text for t in read_trajectories(tmp_path / "first" / "trajectories")]
    assert [text[:27] for text in prompts] == 2 * ["03 Feb 2001 04:05:06.000000"]
    assert load_toml(tmp_path / "first" / "config.toml")["date"] == "2001-02-03T04:05:06"
    assert main([*flags, str(tmp_path / "second")]) == 0
    kept = str(load_toml(tmp_path / "second" / "config.toml")["date"])
    assert abs(datetime.now() - datetime.fromisoformat(kept)) < timedelta(hours=1)
    assert main([*flags, str(tmp_path / "third"), "--date", "today"]) == 2


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}" + TURNS


def test_a_template_without_end_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_with(LOOP, tmp_path / "model")
    begun = time.process_time()  # the rollouts have a thread of their own
    assert main(["rollout", "--engine", "transformers", "--prompt", "chat", "--model", str(folder)]) == 2
    assert time.process_time() - begun < 3 * chat_template.APPLY_S
    said = capsys.readouterr().err
    assert "it does not end; use another model" in said
    assert "Traceback" not in said


def test_a_template_that_comes_to_no_end_for_some_messages_alone_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "APPLY_S", 0.3)
    renderer = renderer_with("{% if 'loop' in messages[-1].content %}" + LOOP.replace(TURNS, "{% endif %}" + TURNS))
    assert renderer.build_question_prompt("S", "Q").text.startswith("[system] S")
    with pytest.raises(ConfigError, match="it does not end"):
        renderer.build_question_prompt("S", "loop")
    assert renderer.build_question_prompt("S", "Q").text.startswith("[system] S"), "it can be applied again"


def test_a_text_without_measure_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"characters.; it writes more than a model reads"):
        renderer_with("{{ 'x' * 30000000 }}").build_question_prompt("", "Q")


def growing(step: str, first: str = "'aaaaaaaa'") -> str:
    """A template that makes the value `n.s` larger forty times."""
    return f"{{% set n = namespace(s={first}) %}}{{% for i in range(40) %}}{step}{{% endfor %}}"


LARGE = {
    "repeated": "{{ 'a' * 2000000000 }}",
    "repeated, the number first": "{{ 2000000000 * 'a' }}",
    "a repeated list": "{{ ([1] * 2000000000)|length }}",
    "width of %": "{{ ('%2000000000d' % 1)|length }}",
    "width of % behind a key": "{{ ('%(a(b))2000000000d' % {'a(b)': 1})|length }}",
    "width of % as an argument": "{{ ('%*d' % (2000000000, 1))|length }}",
    "precision of %": "{{ ('%.2000000000f' % 1.5)|length }}",
    "width of format": "{{ '{:2000000000}'.format(1)|length }}",
    "width of format as an argument": "{{ '{:{}}'.format(1, 2000000000)|length }}",
    "filter format": "{{ '%2000000000d'|format(1)|length }}",
    "filter center": "{{ 'a'|center(2000000000)|length }}",
    "filter center, by name": "{{ 'a'|center(width=2000000000)|length }}",
    "mapped filter": "{{ ['a']|map('center', 2000000000)|list|length }}",
    "filter indent": "{{ 'a'|indent(2000000000, true)|length }}",
    "filter tojson": "{{ messages|tojson(indent=2000000000)|length }}",
    "filter batch": "{{ [1]|batch(2000000000, 0)|list|length }}",
    "filter slice": "{{ [1]|slice(2000000000)|list|length }}",
    "filter round": "{{ 1.5|round(100000000, 'ceil') }}",
    **{f"method {name}": f"{{{{ 'a'.{name}(2000000000)|length }}}}" for name in ("center", "ljust", "rjust", "zfill")},
    "method expandtabs": r"{{ '\t'.expandtabs(2000000000)|length }}",
    "method to_bytes": "{{ (1).to_bytes(2000000000, 'big')|length }}",
    "method translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000})|length }}",
    "method replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000)|length }}",
    "filter replace": "{{ ('a' * 1000000)|replace('a', 'b' * 1000000)|length }}",
    "method join": "{{ ('a' * 1000000).join(['b'] * 10000)|length }}",
    "filter join": "{{ (['b'] * 10000)|join('a' * 1000000)|length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "power of a power": "{{ (9 ** (9 ** 9)) is odd }}",
    "products": growing("{% set n.s = n.s * n.s %}", "99999"),
    "sums": growing("{% set n.s = n.s + n.s %}"),
    "sums of lists": growing("{% set n.s = n.s + n.s %}", "[1]"),
    "joined by ~": growing("{% set n.s = n.s ~ n.s %}"),
    "joined lists": growing("{% set n.s = [n.s, n.s]|join %}"),
    "joined by a method": growing("{% set n.s = ''.join([n.s, n.s]) %}"),
    "filled fields": growing("{% set n.s = '{0}{0}'.format(n.s) %}"),
    "blocks": growing("{% set x %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = x %}"),
    "macros": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + growing("{% set n.s = m(n.s) %}"),
    **{
        f"a list in itself, {way}": growing("{% set n.s = [n.s, n.s] %}", "['a' * 9999]") + f"{{{{ {way} }}}}"
        for way in ("n.s", "n", "n.s|tojson", "n.s|string", "n.s ~ 1", "'%s' % n.s", "'{}'.format(n.s)", "n.s|upper")
    },
    "many values": "{% set n = namespace(s=0) %}"
    "{% for i in range(9999) %}{% set n.s = [n.s, 'a' * 9999999] %}{% endfor %}",
    "many slices": "{% set a = 'a' * 9999999 %}{% set n = namespace(s=0) %}"
    "{% for i in range(9999) %}{% set n.s = [n.s, a[1:]] %}{% endfor %}",
    "output": "{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}",
}


@pytest.mark.parametrize("way", LARGE)
def test_no_operation_of_a_template_makes_more_than_a_model_reads(way: str) -> None:
    begun = time.thread_time()
    with pytest.raises(ConfigError, match="it writes more than a model reads; use another"):
        renderer_with(LARGE[way]).build_question_prompt("", "Q")
    assert time.thread_time() - begun < chat_template.APPLY_S


def test_usual_operations_of_a_template_work_as_in_jinja() -> None:
    usual = (
        "{{ 'ab' * 3 }}|{{ 7 % 4 }}|{{ 2 ** 10 }}|{{ '%5.1f%%' % 2.5 }}|{{ '{:>4}'.format(1) }}|{{ 'a'|center(5) }}|"
        "{{ 'a\nb'|indent(2) }}|{{ [1, 2]|join('-') }}|{{ 'x'.ljust(3) }}|{{ messages[::-1]|length }}|"
        "{{ 1 ~ 'a' ~ none }}|"
        "{{ 'aXa'.replace('X', '--') }}|{{ [1, 2, 3]|batch(2)|list }}|{{ {'a': 1}|tojson(indent=1) }}|"
        "{{ 'a' in 'ba' }}|"
        "{% set x %}{{ 1 + 2 }}{% endset %}{{ x }}|{{ [[1]] + [2] }}|{{ messages|map(attribute='role')|join(',') }}"
    )
    text = renderer_with(usual).chat_template.render_text([{"role": "user", "content": "Q"}], True)
    assert text == (
        'ababab|3|1024|  2.5%|   1|  a  |a\n  b|1-2|x  |1|1aNone|a--a|[[1, 2], [3]]|{\n "a": 1\n}|True|3|[[1], 2]|user'
    )


def test_the_limit_of_a_template_grows_with_the_messages() -> None:
    long = "a" * (1 << 24)
    assert renderer_with(TURNS).chat_template.render_text([{"role": "user", "content": long}], True).count("a") > len(
        long
    )


@pytest.mark.parametrize("bad", ["{{ 1 / 0 }}", "{{ range(10 ** 9) }}", "{{ [].x.y }}", "{% if %}", "{{ '9'.z() }}"])
def test_an_error_of_a_template_is_one_line(bad: str) -> None:
    with pytest.raises(ConfigError, match="it refuses this conversation"):
        renderer_with(bad).build_question_prompt("", "Q")
    if "%" in bad:
        tokenizer = merged_tokenizer()
        tokenizer.chat_template = bad
        with pytest.raises(ConfigError, match="it is not a template of Jinja"):
            Renderer(tokenizer, chat={"thinking": True})


def test_a_limit_counts_cpu_time_of_its_own_thread_and_leaves_nothing_behind() -> None:
    def spin(until_s: float) -> str:
        end = time.thread_time() + until_s
        while time.thread_time() < end:
            pass
        return "done"

    def waits() -> str:
        threading.Event().wait(0.6)
        return "waited"

    assert call_with_time_limit(lambda: spin(0.05), 5.0) == "done"
    assert call_with_time_limit(waits, 0.1) == "waited"
    for _ in range(20):
        with pytest.raises(TimeoutError, match=r"more than 0\.02 s"):
            call_with_time_limit(lambda: spin(60.0), 0.02)
        assert spin(0.01) == "done"
    with pytest.raises(ZeroDivisionError):
        call_with_time_limit(lambda: 1 // 0, 1.0)
    several = [threading.Thread(target=lambda: call_with_time_limit(lambda: spin(0.05), 5.0)) for _ in range(4)]
    for thread in several:
        thread.start()
    with pytest.raises(TimeoutError):
        call_with_time_limit(lambda: spin(60.0), 0.1)
    for thread in several:
        thread.join()


def test_a_limit_that_was_not_reached_leaves_profilers_and_debuggers_working() -> None:
    """A function that is entered under a profile function checks for events until there are none: forever, once."""
    program = (
        "import sys\n"
        "from repl_rl.utils.timeouts import call_with_time_limit\n"
        "call_with_time_limit(lambda: 1, 5.0)\n"
        "def called(): return 42\n"
        "sys.setprofile(lambda *event: None)\n"
        "print(called())\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout == "42\n", run.stderr

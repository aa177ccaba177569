"""`--overwrite` and `--resume` touch what this program wrote, and nothing that another process uses."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.cli.train import TrainConfig
from repl_rl.cli.transcripts import TRANSCRIPTS
from repl_rl.errors import ConfigError
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.list_runs import RunStatus, read_run_info
from repl_rl.runs.run_folder import RUN, RunFolder
from repl_rl.runs.store.export_formats import TABLE
from repl_rl.sandbox import jupyter_kernelspec as jupyter
from repl_rl.sft.finetune_config import POLICY
from repl_rl.trainer.plugins.checkpoint import open_run
from repl_rl.trainer.train import train
from repl_rl.utils.atomic_files import OutputFolder, list_contents, open_output_folder
from repl_rl.utils.file_lock import OWNER, describe_owner, is_locked, lock_folder, read_maker, write_marker

SETTINGS = "seed = 0\n[trainer]\nsteps = 3\n"
Fill = Callable[[Path], None]


def a_text(folder: Path) -> None:
    (folder / "thesis.txt").write_text("years of work")


def others(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name).mkdir()
        a_run(folder / name)


def an_evaluation(folder: Path) -> None:
    write_marker(folder, "eval")
    (folder / "config.toml").write_text("seed = 0\n")
    (folder / "rollouts").mkdir()


def hand_written_settings(folder: Path) -> None:
    (folder / "config.toml").write_text(SETTINGS)


def broken_settings(folder: Path) -> None:
    (folder / "config.toml").write_text("[trainer\n")
    (folder / "checkpoints").mkdir()


def a_run_with_a_note(folder: Path) -> None:
    a_run(folder)
    (folder / "notes.md").write_text("what I learned from this run")


def a_policy(folder: Path) -> None:
    write_marker(folder, "sft")
    (folder / "config.json").write_text("{}")


def old_transcripts(folder: Path) -> None:
    (folder / "trajectories").mkdir()
    for name in ("transcripts.json", "config.toml"):
        (folder / name).touch()


def a_run(folder: Path) -> None:
    with RunFolder(folder, overwrite=True).lock():
        RunFolder(folder, overwrite=True, main=False).create(SETTINGS)


def a_run_of_the_release_before(folder: Path) -> None:
    a_run(folder)
    (folder / OWNER).unlink()


def nothing(folder: Path) -> None:
    pass


def only_the_first_word(folder: Path) -> None:
    write_marker(folder, "train")


def a_torn_first_word(folder: Path) -> None:
    (folder / OWNER).touch()


def half_removed(folder: Path) -> None:
    a_run(folder)
    (folder / "config.toml").unlink()


def tree(folder: Path) -> dict[str, bytes | None]:
    """All that is below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


FOREIGN = [a_text, others, an_evaluation, hand_written_settings, broken_settings, a_policy, old_transcripts]


@pytest.mark.parametrize("fill", [*FOREIGN, a_run_with_a_note])
def test_what_is_no_run_is_not_replaced_by_one(tmp_path: Path, fill: Fill, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    fill(folder)
    before = tree(folder)
    assert main(["train", "--out", str(tmp_path), "--name", "mine", "--overwrite"]) == 2
    told = capsys.readouterr().err
    assert tree(folder) == before
    assert told.count("\n") == 1
    assert str(folder) in told
    assert "choose another --name" in told
    assert (
        "'notes.md', which `repl-rl train` did not write" if fill is a_run_with_a_note else "did not make it"
    ) in told


@pytest.mark.parametrize(
    "fill", [nothing, only_the_first_word, a_torn_first_word, a_run, a_run_of_the_release_before, half_removed]
)
def test_a_run_is_replaced_whole_or_half_made(tmp_path: Path, fill: Fill) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    fill(folder)
    with open_run(RunFolder(folder, overwrite=True), "seed = 7\n", resume=False):
        assert (folder / "config.toml").read_text() == "seed = 7\n"
        assert list_contents(folder) == ["checkpoints", "config.toml"]
        assert read_maker(folder) == "train"


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("a file")
    for flags in ({"overwrite": True}, {"overwrite": False}, {"overwrite": False, "resume": True}):
        with pytest.raises(ConfigError, match=r"run folder is '.*mine'"):
            RunFolder(tmp_path / "mine", **flags)
    assert (tmp_path / "mine").read_text() == "a file"


NAMES = ["", ".", "..", "a/b", "../a", "/", "/etc", "a\0b", "a\nb", "\x1b[31m", "\ud800"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_one_component_of_a_path(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    others(tmp_path)
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match="name is "):
        TrainConfig(name=name, out=tmp_path, overwrite=True)
    for flag in ("--overwrite", "--resume"):
        assert main(["train", "--out", str(tmp_path), "--name", name, flag]) == 2
        # The command line refuses half of a surrogate pair in any argument.
        assert ("argument is " if name == "\ud800" else "name is ") in capsys.readouterr().err
    file = tmp_path.with_suffix(".toml")
    file.write_text(f"name = {json.dumps(name) if name.isascii() else json.dumps('..')}\noverwrite = true\n")
    assert main(["train", "--config", str(file), "--out", str(tmp_path)]) == 2
    assert "name is " in capsys.readouterr().err
    assert tree(tmp_path) == before


def test_a_name_that_no_folder_can_have_is_refused_before_anything_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--out", str(tmp_path / "runs"), "--name", "n" * 300]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "at most 255 bytes; shorten --name" in said.err


@pytest.mark.parametrize("files", [[], [".config.toml.4194305.unfinished"]])
def test_a_run_that_was_killed_before_it_had_settings_starts_when_it_is_resumed(
    tmp_path: Path, files: list[str]
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    write_marker(folder, "train")
    for name in files:
        (folder / name).write_text("seed =")
    with open_run(RunFolder(folder, overwrite=False, resume=True), "seed = 7\n", resume=True) as state:
        assert state is None
        assert (folder / "config.toml").read_text() == "seed = 7\n"
        assert list_contents(folder) == ["checkpoints", "config.toml"]


@pytest.mark.parametrize("fill", [a_text, others, a_policy])
def test_what_is_no_run_is_not_resumed(tmp_path: Path, fill: Fill, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    fill(folder)
    before = tree(folder)
    assert main(["train", "--out", str(tmp_path), "--name", "mine", "--resume"]) == 2
    assert "no run that can be resumed" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no run that can be resumed"):
        train(RolloutConfig(), out=folder, resume=True)
    with pytest.raises(ConfigError, match="run folder is"):
        train(RolloutConfig(), out=folder)
    assert tree(folder) == before


def test_a_run_is_not_replaced_by_one_that_starts_from_its_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    a_run(folder)
    (folder / "checkpoints" / "final").mkdir()
    flags = ["--model", str(folder / "checkpoints" / "final"), "--out", str(tmp_path), "--name", "mine"]
    assert main(["train", *flags, "--overwrite"]) == 2
    assert "it would replace what --model" in capsys.readouterr().err
    assert (folder / "checkpoints" / "final").is_dir()


HOLD = """
import sys
from pathlib import Path
from repl_rl.runs.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]), overwrite=False, resume=True)
with folder.lock():
    print("at work", flush=True)
    sys.stdin.read()
"""


@contextmanager
def at_work(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the run in `folder`."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_run_that_a_process_begins_to_work_on_after_it_was_looked_at_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    a_run(folder)
    late, before = RunFolder(folder, overwrite=True), tree(folder)
    with at_work(folder):
        with pytest.raises(ConfigError, match="another process is using it"), open_run(late, "seed = 7\n", False):
            raise AssertionError("it was taken")
        assert {**tree(folder), OWNER: b""} == {**before, OWNER: b""}


@pytest.mark.parametrize("flag", ["--overwrite", "--resume"])
def test_a_run_that_a_process_is_at_work_on_is_refused_by_its_number_and_host(
    tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    a_run(folder)
    before = tree(folder)
    with at_work(folder) as process:
        assert main(["train", "--out", str(tmp_path), "--name", "mine", flag]) == 2
        told = capsys.readouterr().err
        assert f"another process is using it: process {process.pid} on {socket.gethostname()}" in told
        assert read_run_info(folder).status is RunStatus.RUNNING
        assert {**tree(folder), OWNER: b""} == {**before, OWNER: b""}
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not is_locked(folder)  # who was killed is in nobody's way
    with open_run(RunFolder(folder, overwrite=True), "seed = 7\n", resume=False):
        assert describe_owner(folder) == f"process {os.getpid()} on {socket.gethostname()}"


FORK = """
import os, sys
from pathlib import Path
from repl_rl.utils.file_lock import lock_folder
reader, writer = os.pipe()
with lock_folder(Path(sys.argv[1])):
    if os.fork():
        os.read(reader, 1)
        os._exit(0)
    os.write(writer, b".")
    sys.stdin.read()
"""


def test_a_process_that_was_forked_from_the_owner_does_not_keep_its_lock(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", FORK, str(tmp_path)], stdin=subprocess.PIPE) as process:
        assert process.wait() == 0  # the child waits for the end of its standard input
        assert not is_locked(tmp_path)
        with lock_folder(tmp_path):
            assert is_locked(tmp_path)


def test_a_run_that_appears_while_another_begins_is_not_removed(tmp_path: Path) -> None:
    late = RunFolder(tmp_path / "run", overwrite=False)
    a_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="--overwrite to replace it"), open_run(late, "seed = 7\n", resume=False):
        raise AssertionError
    assert (tmp_path / "run" / "config.toml").read_text() == SETTINGS


def test_settings_are_compared_once_nobody_else_can_change_them(tmp_path: Path) -> None:
    late = RunFolder(tmp_path / "run", overwrite=False, resume=True)
    a_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="seed is 7, the run's 0"), open_run(late, "seed = 7\n", resume=True):
        raise AssertionError
    assert (tmp_path / "run" / "config.toml").read_text() == SETTINGS


def test_a_note_that_appears_while_a_run_begins_stays(tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    late = RunFolder(tmp_path / "run", overwrite=True)
    (tmp_path / "run" / "notes.md").touch()
    with pytest.raises(ConfigError, match=r"notes\.md"), open_run(late, SETTINGS, resume=False):
        raise AssertionError
    assert list_contents(tmp_path / "run") == ["checkpoints", "config.toml", "notes.md"]


RACE = """
import sys
from pathlib import Path
from repl_rl.errors import ConfigError
from repl_rl.runs.run_folder import RunFolder
for line in sys.stdin:
    path, flag = line.split()
    try:
        folder = RunFolder(Path(path), overwrite=flag == "overwrite", resume=flag == "resume")
        with folder.lock():
            folder.create(f"by = {sys.argv[1]}\\n") if not (folder.exists and flag == "resume") else None
            for step in range(1, 4):
                folder.write_step(step, {"by": float(sys.argv[1])}, [])
            print("won", flush=True)
            sys.stdin.readline()
    except ConfigError as error:
        print("refused:", error.remedy, flush=True)
        sys.stdin.readline()
"""


@pytest.mark.parametrize("flag", ["new", "overwrite", "resume"])
def test_of_two_that_begin_at_once_one_has_the_run_and_the_other_is_refused(tmp_path: Path, flag: str) -> None:
    racers = [
        subprocess.Popen([sys.executable, "-c", RACE, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    try:
        for attempt in range(20):
            folder = tmp_path / f"{flag}-{attempt}"
            if flag == "overwrite":
                a_run(folder)
            tell(racers, f"{folder} {flag}\n")
            said = [racer.stdout.readline() for racer in racers if racer.stdout is not None]
            assert sorted(words.split(":")[0].strip() for words in said) == ["refused", "won"], said
            winner = said.index("won\n")
            refused = said[1 - winner]
            assert (
                f"process {racers[winner].pid} on" in refused
                or "another process is using it" in refused
                or ("--overwrite to replace it" in refused)
            )
            rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
            assert [(row["step"], row["by"]) for row in rows] == [(step, float(winner)) for step in (1, 2, 3)]
            assert (folder / "config.toml").read_text() == f"by = {winner}\n"
            tell(racers, "\n")
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


def tell(racers: list[subprocess.Popen[str]], words: str) -> None:
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write(words)
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.flush()


LOCKED_AGAIN_AND_AGAIN = """
import sys
from pathlib import Path
from repl_rl.utils.file_lock import lock_folder
for n in range(3000):
    with lock_folder(Path(sys.argv[1])):
        pass
"""


def test_whoever_looks_while_a_folder_is_locked_finds_the_verb_that_made_it(tmp_path: Path) -> None:
    with lock_folder(tmp_path, made_by="a much longer name of a verb"):
        pass
    with lock_folder(tmp_path, made_by="train"):
        pass
    with subprocess.Popen([sys.executable, "-c", LOCKED_AGAIN_AND_AGAIN, str(tmp_path)]) as locking:
        found = {read_maker(tmp_path)}
        while locking.poll() is None:
            found.add(read_maker(tmp_path))
    assert (found, locking.returncode) == ({"train"}, 0)


def test_a_huge_file_in_place_of_a_lock_file_is_cut(tmp_path: Path) -> None:
    with (tmp_path / OWNER).open("wb") as huge:
        huge.truncate(2**40)
    with lock_folder(tmp_path, made_by="train"):
        assert read_maker(tmp_path) == "train"
    assert (tmp_path / OWNER).stat().st_size <= 4096


def test_a_link_to_a_folder_stands_for_that_folder(tmp_path: Path) -> None:
    disk, link = tmp_path / "disk", tmp_path / "linked"
    disk.mkdir()
    link.symlink_to("disk")
    with open_run(RunFolder(link, overwrite=True), "seed = 1\n", resume=False):
        pass
    inode = disk.stat().st_ino
    with (
        open_run(RunFolder(link, overwrite=True), "seed = 2\n", resume=False),
        pytest.raises(ConfigError, match="another process is using it"),
    ):
        RunFolder(disk, overwrite=True)
    with open_run(RunFolder(link, overwrite=False, resume=True), "seed = 2\n", resume=True):
        pass
    assert (link.is_symlink(), disk.stat().st_ino) == (True, inode)
    assert (disk / "config.toml").read_text() == "seed = 2\n"


@pytest.mark.parametrize("target", ["nowhere", "linked"])
def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "linked").symlink_to(target)
    for flags in ([], ["--overwrite"], ["--resume"]):
        assert main(["train", "--out", str(tmp_path), "--name", "linked", *flags]) == 2
        assert f"it is a link to '{target}', which is not there" in capsys.readouterr().err
    assert os.readlink(tmp_path / "linked") == target


def test_links_in_a_run_are_removed_and_not_followed(tmp_path: Path) -> None:
    folder, big, secret = tmp_path / "run", tmp_path / "big", tmp_path / "secret"
    big.mkdir()
    (big / "weights").touch()
    secret.write_text("not ours")
    a_run(folder)
    (folder / "checkpoints").rmdir()
    (folder / "checkpoints").symlink_to(big)
    with open_run(RunFolder(folder, overwrite=True), SETTINGS, resume=False):
        assert not (folder / "checkpoints").is_symlink()
    assert (big / "weights").exists()
    (folder / OWNER).unlink()
    (folder / OWNER).symlink_to(secret)  # as a stranger's run could have it
    with pytest.raises(ConfigError), open_run(RunFolder(folder, overwrite=True), SETTINGS, resume=False):
        raise AssertionError
    assert secret.read_text() == "not ours"


def test_what_a_stranger_wrote_about_the_owner_does_not_reach_the_terminal(tmp_path: Path) -> None:
    for said in ('{"pid": 1, "host": "\\u001b[2J"}', '{"pid": "x", "host": "h"}', "[" * 4000, "[]", "\0"):
        (tmp_path / OWNER).write_text(said)
        assert describe_owner(tmp_path) == "another process"
        assert read_maker(tmp_path) == ""
    (tmp_path / OWNER).unlink()
    os.mkfifo(tmp_path / OWNER)
    assert describe_owner(tmp_path) == "another process"
    with lock_folder(tmp_path):
        pass


@pytest.mark.parametrize("kind", [POLICY, TRANSCRIPTS, TABLE, RUN], ids=lambda kind: kind.verb)
def test_each_verb_replaces_its_own_output_alone(tmp_path: Path, kind: OutputFolder) -> None:
    for fill in (a_text, others, an_evaluation, hand_written_settings, broken_settings):
        folder = tmp_path / fill.__name__
        folder.mkdir()
        fill(folder)
        with pytest.raises(ConfigError, match="did not make it"):
            kind.validate_replaceable(folder)
    own = tmp_path / "own"
    own.mkdir()
    kind.validate_replaceable(own)
    write_marker(own, kind.verb)
    (own / kind.name_patterns[0].replace("*", "0")).touch()
    kind.validate_replaceable(own)
    (own / "mine").touch()
    with pytest.raises(ConfigError, match="'mine', which"):
        kind.validate_replaceable(own)


def test_a_new_policy_replaces_a_policy_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy, link = tmp_path / "policy", tmp_path / "link"
    flags = ["sft", "--fresh", "--out", str(policy)]
    assert main(flags) == 0
    assert (main(flags), main([*flags, "--overwrite", "--seed", "1"])) == (2, 0)
    (policy / OWNER).unlink()  # as the release before wrote it
    link.symlink_to(policy)
    assert main(["sft", "--fresh", "--overwrite", "--out", str(link)]) == 0
    assert link.is_symlink()
    (policy / "keep").write_text("mine")
    before = tree(policy)
    capsys.readouterr()
    assert main([*flags, "--overwrite"]) == 2
    assert "it holds 'keep', which `repl-rl sft` did not write" in capsys.readouterr().err
    assert tree(policy) == before
    model = tmp_path / "model"  # a user's, as any library writes it
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    assert main(["sft", "--fresh", "--overwrite", "--out", str(model)]) == 2
    assert sorted(os.listdir(model)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(os.listdir(tmp_path)) == ["link", "model", "policy"]


def test_a_fine_tuning_does_not_replace_what_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "policy"
    assert main(["sft", "--fresh", "--out", str(policy)]) == 0
    (policy / "rollouts").mkdir()
    before = tree(policy)
    for flags in (["--model", str(policy), "--samples", "1"], ["--data", str(policy / "rollouts")]):
        assert main(["sft", *flags, "--out", str(policy), "--overwrite"]) == 2
        assert f"it would replace what {flags[0]}" in capsys.readouterr().err
    assert tree(policy) == before


FRESH = ["sft", "--fresh"]
DEMONSTRATED = ["transcripts", "--from-tasks", "builtin:count", "--sandbox", "inprocess"]

WRITE = """
import sys
from repl_rl.cli import main
from repl_rl.utils import atomic_files
fill = atomic_files.replace_folder_atomically
def slow(*arguments):
    print("at work", flush=True)
    sys.stdin.read()
    return fill(*arguments)
atomic_files.replace_folder_atomically = slow
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "verb", [pytest.param(FRESH, marks=pytest.mark.heavy), [*DEMONSTRATED, "--count", "2"]], ids=lambda verb: verb[0]
)
def test_a_second_process_at_one_output_is_refused_by_number_and_host_and_a_killed_one_is_in_nobodys_way(
    tmp_path: Path, verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([*verb, "--out", str(out)]) == 0
    before = tree(out)
    command = [sys.executable, "-c", WRITE, *verb, "--out", str(out), "--overwrite"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line == "at work\n" for line in process.stdout)
        capsys.readouterr()
        for flags in ([], ["--overwrite"]):
            assert main([*verb, *flags, "--out", str(out)]) == 2
            told = capsys.readouterr().err
            assert f"output folder is '{out}'; another process is using it: process {process.pid} on" in told
            assert socket.gethostname() in told
        process.kill()
    assert tree(out) == before
    assert main([*verb, "--overwrite", "--seed", "1", "--out", str(out)]) == 0
    assert tree(out) != before
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.heavy
def test_transcripts_that_are_killed_at_their_work_leave_the_older_ones(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main([*DEMONSTRATED, "--count", "2", "--out", str(out)]) == 0
    before = tree(out)
    command = [sys.executable, "-m", "repl_rl.cli", *DEMONSTRATED, "--count", "100000", "--overwrite", "--out"]
    with subprocess.Popen([*command, str(out)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any("to execute" in line for line in process.stdout)
        process.kill()
    assert tree(out) == before
    assert main([*DEMONSTRATED, "--count", "3", "--overwrite", "--out", str(out)]) == 0
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(("overwrite", "told"), [(False, "it exists by now; move it away"), (True, "did not make it")])
def test_an_output_does_not_replace_what_came_to_lie_there(tmp_path: Path, overwrite: bool, told: str) -> None:
    out = tmp_path / "out"

    def work() -> None:
        with open_output_folder(out, TRANSCRIPTS, overwrite) as made:
            (made / "config.toml").touch()
            out.mkdir()
            a_text(out)

    with pytest.raises(ConfigError, match=told):
        work()
    assert os.listdir(tmp_path) == ["out"]
    assert list_contents(out) == ["thesis.txt"]


def test_a_folder_of_a_users_that_has_the_name_of_a_lock_stays(tmp_path: Path) -> None:
    (tmp_path / ".out.lock").mkdir()
    a_text(tmp_path / ".out.lock")
    before = tree(tmp_path)
    with (
        pytest.raises(ConfigError, match=r"\.out\.lock.*thesis\.txt"),
        open_output_folder(tmp_path / "out", POLICY, overwrite=False),
    ):
        raise AssertionError
    assert tree(tmp_path) == before


def test_an_evaluation_is_for_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    flags = ["eval", "--engine", "transformers", "--sandbox", "unsafe", "--count", "2", "--out", str(folder)]
    with lock_folder(folder, "eval"):
        assert main(flags) == 2
        assert f"process {os.getpid()} on" in capsys.readouterr().err
    assert main(flags) == 0
    assert main(flags) == 0


@pytest.mark.parametrize("content", ['{"name": "my-package"}', "[1, 2]", "notes"])
def test_figures_do_not_replace_another_file(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "package.json"
    file.write_text(content)
    assert main(["eval", "--engine", "transformers", "--sandbox", "unsafe", "--count", "2", "--json", str(file)]) == 2
    assert "another file is there" in capsys.readouterr().err
    assert file.read_text() == content


def test_a_kernel_of_another_program_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "kernels" / "python3" / "kernel.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"argv": ["python", "-m", "ipykernel_launcher"], "display_name": "Python 3"}')
    with pytest.raises(ConfigError, match="another file is there"):
        jupyter.install_kernelspec(tmp_path, name="python3", isolated=False)
    assert "ipykernel_launcher" in file.read_text()
    jupyter.install_kernelspec(tmp_path, isolated=False)
    jupyter.install_kernelspec(tmp_path, isolated=False)


def test_make_clean_leaves_runs() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert "runs" not in makefile.partition("\nclean:")[2].partition("\n\n")[0].split()

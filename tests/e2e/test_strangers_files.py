"""Files of strangers' runs: packed to burst, linked to secrets, nested without end. Each is one line."""

import gzip
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.errors import ReplRLError, StoreError
from repl_rl.runs.report import write_report
from repl_rl.runs.report.report_data import build_metric_columns, build_payload
from repl_rl.runs.run_metadata import read_summary
from repl_rl.runs.store import Store, write_step
from repl_rl.runs.store.appendable_gzip import pack_member
from repl_rl.runs.store.export_formats import read_notebook
from repl_rl.runs.store.trajectory_json import StoredWorkspace, to_record
from repl_rl.tasks.bounded_decompression import MAX_RECORD_BYTES, MAX_UNPACK_RATIO
from repl_rl.utils.package_data import find_asset
from tests.support.forked_commands import run_command
from tests.support.run_folders import rollout, run_folder

SECRET = "correct horse battery staple"
BOMB = b"0" * (MAX_RECORD_BYTES + 1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_folder(tmp_path / "run")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text(f'{{"status": "finished", "password": "{SECRET}"}}\n')
    return file


def steps(run: Path) -> Path:
    return run / "trajectories"


def test_a_record_that_bursts_is_damage_and_the_others_are_read(run: Path) -> None:
    here = len(Store(run))
    file = steps(run) / "999999.jsonl.gz"
    file.write_bytes(pack_member("bomb", BOMB) + pack_member("small", b"{}"))
    store = Store(run)
    assert len(list(store)) == here
    (bomb, small) = map(str, store.damaged_regions)
    assert f"'bomb' unpacks to more than {MAX_RECORD_BYTES:,} bytes" in bomb
    assert "not a trajectory" in small or "schema_version" in small
    with pytest.raises(StoreError, match="unpacks to more than"):
        store["bomb"]
    assert file.stat().st_size < 100_000
    write_report(run)


@pytest.mark.parametrize("text", [BOMB, b"[]\n" * (2 * MAX_RECORD_BYTES // 3)], ids=["one line", "many lines"])
def test_plain_gzip_that_bursts_is_damage(text: bytes, tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl.gz"
    file.write_bytes(gzip.compress(text, mtime=0))
    with pytest.raises(StoreError, match="not a trajectory") if text != BOMB else pytest.raises(AssertionError):
        assert not Store(file).damaged_regions, Store(file).damaged_regions


def test_many_records_of_a_run_are_read_as_far_as_their_size_on_disk_explains(run: Path) -> None:
    (first,) = [entry.trajectory for entry in list(Store(run))[:1]]
    wide = replace(first, prompt=replace(first.prompt, text="0" * (MAX_RECORD_BYTES // 4)))
    folder = run.parent / "wide"
    write_step(folder, 0, [replace(wide, id=str(n)) for n in range(12)])
    store = Store(folder)
    read = len(list(store))
    assert 3 <= read < 12
    (damage,) = store.damaged_regions
    assert f"{MAX_UNPACK_RATIO} times what is on disk" in damage.reason


def test_a_report_of_a_bomb_takes_little_memory(tmp_path: Path, run: Path) -> None:
    """A GiB of zeros in a MiB, in one record, in a process with 4 GiB of address space beside a bare interpreter's."""
    packing = zlib.compressobj(9, wbits=31)
    chunks = [packing.compress(b"0" * (1 << 20)) for _ in range(1 << 10)]
    (steps(run) / "888888.jsonl.gz").write_bytes(b"".join(chunks) + packing.flush())
    ask = "import sys; from repl_rl.runs.store import Store; from pathlib import Path; s = Store(Path(sys.argv[1]))\n"
    # ru_maxrss would begin with the memory of the process that started it.
    ask += "print(len(list(s)), *[line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')])\n"
    done = subprocess.run([sys.executable, "-P", "-c", ask, run], capture_output=True, text=True)
    read, peak_kib = map(int, done.stdout.split())
    assert read > 0
    assert peak_kib < 1 << 20


@pytest.mark.parametrize("name", ["config.toml", "summary.json", "metrics.jsonl"])
def test_a_link_out_of_a_run_is_not_followed_into_a_report(
    name: str, run: Path, secret: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(secret)
    assert main(["view", str(run), "--no-open"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{name}' is a link that leads out of its folder; it is not followed" in line
    assert not (run / "report.html").exists()
    assert main(["runs", str(run.parent)]) == 0
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err


def test_links_within_a_run_and_a_run_that_is_a_link_are_followed(run: Path, tmp_path: Path) -> None:
    (run / "summary.json").rename(run / "kept.json")
    (run / "summary.json").symlink_to("kept.json")
    (tmp_path / "linked").symlink_to(run)
    assert read_summary(tmp_path / "linked")
    assert len(Store(tmp_path / "linked")) == len(Store(run))


def test_trajectories_and_captions_of_elsewhere_are_not_taken_in(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "private"
    write_step(other, 7, [rollout(7, "private", 0)])
    (steps(run) / "000007.jsonl.gz").symlink_to(other / "000007.jsonl.gz")
    store = Store(run)
    assert not any("private" in name for name in store.ids)
    assert ["a link that leads out" in each.reason for each in store.damaged_regions] == [True]
    (steps(run) / "tokens.json").unlink()
    (steps(run) / "tokens.json").symlink_to(other / "000007.jsonl.gz")
    with pytest.raises(StoreError, match="not followed"):
        store.read_tokens()
    run2 = tmp_path / "run2"
    run2.mkdir()
    (run2 / "trajectories").symlink_to(other)
    with pytest.raises(StoreError, match="leads out of its folder"):
        Store(run2)


def test_pipes_and_loops_are_no_files_of_a_run(run: Path) -> None:
    os.mkfifo(steps(run) / "000050.jsonl.gz")
    os.symlink("000051.jsonl.gz", steps(run) / "000051.jsonl.gz")
    (run / "summary.json").unlink()
    os.mkfifo(run / "summary.json")
    store = Store(run)
    assert len(store.damaged_regions) == 2
    assert len(list(store)) > 0
    assert read_summary(run) is None
    write_report(run)


DEEP = "[" * 100_000
HOSTILE = {
    "deep settings": ("config.toml", f"a = {DEEP}"),
    "deep keys": ("config.toml", f"{'a.' * 5000}a = 1"),
    "settings that are no text": ("config.toml", "\udcff"),
    "deep summary": ("summary.json", DEEP),
    "a long number": ("summary.json", f'{{"steps": {"9" * 5000}}}'),
    "a summary that is no table": ("summary.json", "[1]"),
    "deep captions": ("trajectories/tokens.json", DEEP),
    "captions that are no texts": ("trajectories/tokens.json", "[1, {}]"),
    "captions that are a table": ("trajectories/tokens.json", '{"0": "a"}'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_nested_without_end_or_of_another_kind_is_one_line(
    name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, text = HOSTILE[name]
    (run / file).write_text(text, errors="surrogateescape")
    verb = ["replay", str(run), "--verify"] if file == "config.toml" else ["view", str(run), "--no-open"]
    assert main(verb) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert Path(file).name in line
    assert len(line) < 1000
    assert main(["runs", str(run.parent)]) == 0


def test_figures_that_no_page_can_read_are_left_out(run: Path) -> None:
    rows = [
        '{"step": 1, "a": NaN, "b": 1e999, "c": {"d": 1}, "e": "text", "f": 2.5}',
        DEEP,
        "[]",
        '{"step": 2, "f": -Infinity}',
    ]
    (run / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))
    (run / "summary.json").write_text('{"status": "finished", "eval": NaN, "deep": [[1e999]]}')
    found = build_metric_columns(run)
    assert found == {"step": [1, 2], "f": [2.5, None], **{name: [None, None] for name in "abce"}}
    assert read_summary(run) == {"status": "finished", "eval": None, "deep": [[None]]}
    json.dumps(build_payload(run), allow_nan=False)


def test_records_with_values_of_another_kind_are_damage(run: Path) -> None:
    (entry,) = list(Store(run))[:1]
    good = json.dumps(to_record(entry))
    odd = {
        "deep": DEEP,
        "number": f'{{"schema_version": {"9" * 5000}}}',
        "nan": good.replace('"wall_s": 0.5', '"wall_s": NaN'),
        "ids": good.replace('"segments": [', '"segments": [7, '),
        "text": good.replace('"seed": 0', '"seed": "zero"', 1),
        "children": good.replace('"seed"', '"children": [1], "seed"', 1),
        "token": good.replace('"token_ids": [9, 7]', '"token_ids": ["a"]').replace("[9, 7]", '["a"]'),
        "prompt": good.replace('"prompt": ["', '"prompt": [7, "'),
        "answer": good.replace('"1"]', '{"a": 1}]'),
        "bytes": "\udcff\udcfe",
    }
    file, taken = steps(run) / "777777.jsonl.gz", list[str]()
    for name, text in odd.items():
        file.write_bytes(pack_member(name, text.encode("utf-8", "surrogateescape")))
        store = Store(run)
        list(store)
        with suppress(ReplRLError):
            store[name]
            taken.append(name)
        json.dumps(build_payload(run), allow_nan=False)
    assert taken == []


@pytest.mark.parametrize("content", [b"[]", b'{"values": 1, "files": {}}', b"\xff", b"[" * 100_000])
def test_a_workspace_whose_digest_is_right_and_whose_content_is_not_is_shown_as_not_readable(
    content: bytes, run: Path
) -> None:
    digest = hashlib.sha256(content).hexdigest()
    folder = steps(run)
    (folder / "workspaces").mkdir(exist_ok=True)
    (folder / "workspaces" / f"{digest}.json").write_bytes(content)
    write_step(folder, 600000, [replace(rollout(600000, "w", 0), workspace=StoredWorkspace(digest, folder))])
    assert write_report(run).is_file()


@pytest.mark.parametrize(
    "text", [DEEP, '{"metadata": 1}', '{"metadata": {"repl_rl": "\\ud800"}}', '{"metadata": {"repl_rl": "[[["}}']
)
def test_a_notebook_that_is_none_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "one.ipynb").write_text(text)
    with pytest.raises(StoreError):
        read_notebook(tmp_path / "one.ipynb")


class Marking:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("part", ["config", "tokenizer"])
def test_code_of_a_model_does_not_run_for_a_user_who_says_yes(part: str, tmp_path: Path) -> None:
    """Without `trust_remote_code=False`, transformers asks on the terminal."""
    model, mark = tmp_path / "model", tmp_path / "mark"
    shutil.copytree(find_asset("policies/quickstart"), model)
    (model / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    changes = {
        "config": ("config.json", {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModel": "evil.M"}}),
        "tokenizer": (
            "tokenizer_config.json",
            {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}},
        ),
    }
    name, change = changes[part]
    (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | change))
    command = ("rollout", "--engine", "transformers", "--count", "1", "--model", str(model))
    done = run_command(*command, typed="y\n" * 9)
    assert not mark.exists()
    assert "y/N" not in done.stdout
    if done.returncode != 0:
        assert done.returncode == 2
        assert "its own code (auto_map), which is never run; use a model" in done.stderr.splitlines()[-1]


def test_code_and_pickles_of_a_model_do_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, mark = tmp_path / "model", tmp_path / "mark"
    shutil.copytree(find_asset("policies/quickstart"), model)
    (model / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    for name in ("config.json", "tokenizer_config.json"):
        said = json.loads((model / name).read_text())
        classes = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", "evil.T"]}
        (model / name).write_text(json.dumps({**said, "auto_map": classes}))
    command = ["rollout", "--engine", "transformers", "--count", "1", "--rollout.max-lines", "1", "--model", str(model)]
    assert main(command) in (0, 2)
    assert not mark.exists()
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Marking(mark)))
    assert main(command) == 2
    assert not mark.exists()
    assert "Traceback" not in capsys.readouterr().err

"""Settings of `train` that are tried together, pair by pair: python -m tests.support.trainer.setting_pairs OUT ROW...

Each row is a command line. It is trained undisturbed; then trained, killed at a random moment, resumed, maybe killed
again, and so on to its end. A row's verdict is printed as a line of JSON as soon as it is known.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from allpairspy import AllPairs

# What forks would each import: it takes longer than all the rest.
from matplotlib import figure as _figure  # noqa: F401
from matplotlib.backends import backend_agg as _backend  # noqa: F401
from peft import LoraConfig as _adapters  # noqa: F401
from torch.utils import tensorboard as _tensorboard  # noqa: F401
from transformers import AutoTokenizer

from repl_rl import cli
from repl_rl.cli.train import TrainConfig
from repl_rl.engine import ENGINES, Engine, EngineConfig, EngineOptions, ScriptedEngine
from repl_rl.engine.vllm_subprocess import disable_tqdm_semaphores
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.runs.store import read_trajectories
from repl_rl.sandbox import LineResult
from repl_rl.settings.argument_parser import parse
from repl_rl.trainer.plugins.checkpoint import find_difference, find_newest_state
from repl_rl.trajectory.trajectory import Line
from repl_rl.utils.package_data import find_asset
from tests.support.kill_at_write import Doom
from tests.support.strip_timings import untimed as rollouts_without_times
from tests.support.trainer.killed_training import over, use_one_thread
from tests.support.trainer.resumed_runs import AGED, CLOCKED, ageless, same
from tests.support.trainer.resumed_runs import untimed as value_without_times

STEPS = 3
Words = Sequence[str]
Row = Mapping[str, str]
"""A value of each setting, by its name in `SETTINGS`."""
SMALL: Words = (
    *("--sandbox", "local", "--train-tasks", "24", "--eval-tasks", "2"),
    *("--trainer.steps", str(STEPS), "--trainer.prompts-per-step", "2", "--trainer.group-size", "2"),
    *("--trainer.learning-rate", "1e-3", "--rollout.max-lines", "3", "--rollout.max-line-tokens", "12"),
    # Which line a clock cuts short depends on the machine's other work.
    *("--limits.line-timeout-s", "300", "--rollout.max-wall-s", "3000"),
)
ADD, OWN = "tests.support.trainer.user_rewards:even", "Solve it.\n{question}\n{banner}"
SETTINGS: Mapping[str, Mapping[str, Words]] = {
    "sampler": {
        "repl": (),
        "giving up": ("--sampler", "repl(max_error_streak=2)"),
        "candidates": ("--sampler", "repl(candidates=2)"),
        "thinking": ("--sampler", "repl(thinking='</think>', thinking_tokens=4)"),
        "fenced": ("--sampler", "fenced"),
        "feedback": ("--sampler", "feedback"),
        "tools": ("--sampler", "judge_tool"),
    },
    "prompt": {
        "bare": (),
        "few_shot": ("--prompt", "few_shot"),
        "chat": ("--prompt", "chat"),
        "file": ("--prompt", "{out}/prompt.txt"),
    },
    "groups": {
        "each": (),
        "dynamic_sampling": ("--trainer.group-sampling", "dynamic_sampling(max_rounds=1)"),
        "window": ("--trainer.group-sampling", "fifo_window(in_flight_share=0.9)"),
    },
    "ahead": {"0": (), "1": ("--trainer.max-staleness-steps", "1"), "2": ("--trainer.max-staleness-steps", "2")},
    "estimator": {
        name: ("--trainer.estimator", name)
        for name in (*("two_stream", "outcome", "process", "return_to_go(given='as_given')", "state_anchor"),)
    },
    "importance": {
        name: ("--trainer.importance-sampling", name) for name in ("token_truncate", "token_mask", "token_band", "none")
    },
    "loss": {name: ("--trainer.loss", name) for name in ("dapo", "grpo", "dr_grpo", "cispo", "sapo")},
    "optimizer": {
        name: ("--trainer.optimizer", name) for name in ("adamw_torch_fused", "adafactor", "sgd(momentum=0.9)")
    },
    "schedule": {
        "linear": (),
        "constant": ("--trainer.lr-scheduler", "constant", "--trainer.warmup-steps", "0"),
        "cosine": ("--trainer.lr-scheduler", "cosine", "--trainer.warmup-steps", "1"),
        "decay": (
            *("--trainer.lr-scheduler", "warmup_stable_decay(num_decay_steps=1)"),
            *("--trainer.warmup-steps", "1"),
        ),
    },
    "host": {
        "none": (),
        "query": ("--host-functions.llm_query.train", "true", "--host-functions.llm_query.max-tokens", "4"),
        "rollout": ("--host-functions", "rollout"),
    },
    "report": {
        "none": (),
        "tensorboard": ("--trainer.report-to", "tensorboard"),
    },
    "states": {
        "each": ("--checkpoint.every-s", "0", "--checkpoint.max-time-share", "1.0"),
        "one": (
            *("--checkpoint.every-s", "0", "--checkpoint.max-time-share", "1.0"),
            *("--checkpoint.keep-last", "1"),
        ),
        "seldom": (),
        "never": ("--checkpoint", "never"),
    },
    "stops": {
        "none": (),
        "mask": ("--trainer.stops.mask", "line_too_long"),
        "penalise": ("--trainer.stops.penalise", "max_lines", "eos", "--trainer.stops.penalty", "0.25"),
    },
    "rewards": {
        "table": (),
        "for running": ("--trainer.rewards.ok", "0.05"),
        "function": (f"--trainer.line-rewards.{ADD}", "0.1"),
        "potential": ("--trainer.potentials.error-potential", "0.1"),
    },
    "judges": {
        "task": (),
        "weighed": ("--judges.task", "1", "--judges.tests.support.trainer.user_rewards:short", "0.2"),
        "group": ("--group-judges.tests.support.trainer.user_rewards:shortest", "0.3"),
    },
    "save": {"0": (), "1": ("--trainer.save-steps", "1"), "2": ("--trainer.save-steps", "2")},
    "eval": {"0": (), "1": ("--eval-steps", "1"), "2": ("--eval-steps", "2")},
    "kl": {"none": (), "k3": ("--trainer.kl", "k3"), "unbiased": ("--trainer.kl", "unbiased(beta=0.1)")},
    "batches": {
        "whole": (),
        "updates": ("--trainer.num-iterations", "2"),
        "parts": ("--trainer.num-iterations", "2", "--trainer.num-mini-batches", "2"),
        "micro": ("--trainer.per-device-batch-size", "1"),
    },
    "scoring": {"shared": (), "alone": ("--trainer.prefix-sharing", "off"), "slow": ("--trainer.no-fast-logprobs",)},
    "engine": {"transformers": ("--engine", "transformers"), "clerk": ("--engine", "clerk")},
    "concurrency": {"1": ("--concurrency", "1"), "4": ("--concurrency", "4")},
    "lora": {"none": (), "rank 2": ("--trainer.lora-rank", "2")},
    "dtype": {"float32": (), "bfloat16": ("--trainer.dtype", "bfloat16")},
    "curriculum": {"off": (), "on": ("--curriculum",)},
    "checkpointing": {"off": (), "on": ("--trainer.gradient-checkpointing",)},
    "overshoot": {"forbid": (), "carry": ("--newline-tokens", "carry")},
    "kv": {"drop": (), "keep": ("--kv-on-sync", "keep")},
    "context": {"model": (), "short": ("--context-tokens", "900")},
    "validation": {"split": (), "file": ("--validation", "{out}/held_out.jsonl")},
    "preload": {"none": (), "json": ("--preload", "json")},
    "space": {"observed": (), "sampled": ("--prompt-space", "sampled")},
}
REFUSED: Sequence[Mapping[str, Sequence[str]]] = (
    {"groups": ["window"], "ahead": ["0"]},
    {"groups": ["dynamic_sampling"], "ahead": ["1", "2"]},
    {"kv": ["keep"], "ahead": ["0"]},
    {"importance": ["none"], "ahead": ["1", "2"]},
    {"estimator": ["outcome"], "rewards": ["function", "potential"]},
    {"sampler": ["feedback", "tools"], "prompt": ["file"]},
)
"""Values that do not go together: each of them is refused in one line, before anything is opened or written."""
SCRIPTS = (
    "x = 6 * 7\nx\nsubmit_final_answer(x)\n",
    "1/0\nprint(1)\n2\n",
    "for i in range(2):\n    i\n\n",
    "y = = 1\ny\n3\n",
)
CHAT = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>"
    "{% endfor %}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True, slots=True)
class Clerk(EngineConfig):
    """The scripted engine, whose scripts are Python."""

    kind: ClassVar[str] = "clerk"
    about: ClassVar[str] = "scripts"

    @asynccontextmanager
    async def open(self, opening: EngineOptions) -> AsyncIterator[Engine]:
        """See `EngineConfig.open`."""
        written = Renderer.from_folder(opening.folder, "forbid").encode_as_sampled
        scripts = [[*written(text * 60)] for text in SCRIPTS]
        yield ScriptedEngine(scripts, context_tokens=900, forbidden_ids=opening.forbidden_ids)


def refused(row: Row) -> bool:
    """Whether a row, or a part of one, holds values that are refused together."""
    return any(all(row.get(name) in values for name, values in pair.items()) for pair in REFUSED)


def fits(row: Row) -> bool:
    """Whether a part of a row is not refused, and leaves each other setting a value that is not."""
    left = (name for name in SETTINGS if name not in row)
    return not refused(row) and all(any(not refused({**row, name: value}) for value in SETTINGS[name]) for name in left)


@cache
def table() -> Sequence[Row]:
    """Rows in which each two values of two settings are together at least once, but for those that are refused."""
    names = list(SETTINGS)
    given = [list(values) for values in SETTINGS.values()]
    made = AllPairs(given, filter_func=lambda part: not refused(dict(zip(names, part, strict=False))))
    rows = [dict(zip(names, values, strict=True)) for values in made]
    # Where a choice leaves no value for a later setting, AllPairs gives the pair up: such pairs get rows here.
    missing = dict.fromkeys(pair for pair in pairs() if fits(dict(pair)))
    for row in rows:
        for pair in combinations(row.items(), 2):
            missing.pop(pair, None)
    while missing:
        row = dict(next(iter(missing)))
        for name in names:
            if name not in row:
                able = [value for value in SETTINGS[name] if fits({**row, name: value})]
                row[name] = max(
                    able, key=lambda value: sum(set(pair) <= {*row.items(), (name, value)} for pair in missing)
                )
        rows.append({name: row[name] for name in names})
        for pair in combinations(rows[-1].items(), 2):
            missing.pop(pair, None)
    return rows


Value = tuple[str, str]
"""A setting and one of its values."""


def pairs() -> Iterator[tuple[Value, Value]]:
    """Each two values of two settings."""
    values = [[(name, value) for value in values] for name, values in SETTINGS.items()]
    return (pair for one, other in combinations(values, 2) for pair in product(one, other))


def words(row: Row, out: Path) -> list[str]:
    """The command line of a row, without where its run is."""
    chosen = [word.format(out=out) for name, value in row.items() for word in SETTINGS[name][value]]
    if row["engine"] == "clerk":  # its log probabilities are of nothing
        chosen = [f"{word}(tolerance=100.0)" if before == "--trainer.importance-sampling" else word
                  for before, word in zip(["", *chosen], chosen, strict=False)]  # fmt: skip
    return ["train", "--model", str(out / "model"), *SMALL, *chosen]


def prepare(out: Path) -> None:
    """The policy and the files that rows name: the bundled policy with a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(find_asset("policies/quickstart"))
    tokenizer.chat_template = CHAT
    (out / "model").mkdir(parents=True)
    for file in find_asset("policies/quickstart").iterdir():
        (out / "model" / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(out / "model")
    (out / "prompt.txt").write_text(OWN)
    asked = [{"id": f"held {n}", "question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(2)]
    (out / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))


def train(arguments: Words, log: Path, kill_at: int | None = None, after_s: float = 0.0) -> int:
    """Train in a fork, so that nothing is imported again. Returns its exit code, or less than 0 where it was killed.

    How often it wrote is left in `log` with the ending `.count`.
    """
    pid = os.fork()
    if not pid:
        code = 70
        try:
            with log.open("ab") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            use_one_thread()
            disable_tqdm_semaphores()
            note_addresses(log.with_suffix(ADDRESSES))
            doom = Doom(kill_at, after_s)
            sys.addaudithook(doom.hook)
            code = cli.main(arguments)
            sys.stdout.flush()
            log.with_suffix(".count").write_text(str(doom.count))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if not over(pid, LIMIT_S):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return 124
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def note_addresses(note: Path) -> None:
    """In the child: make the file `note` once a line prints an address, which no second run prints again."""
    push = Episode.push

    async def noting(episode: Episode, line: Line) -> LineResult:
        result = await push(episode, line)
        if " at 0x" in result.text:
            os.close(os.open(note, os.O_CREAT))
        return result

    Episode.push = noting  # type: ignore[method-assign,assignment]


ADDRESSES = ".addresses"
LIMIT_S = 280.0
"""Of one training, which takes about 2 seconds."""


@dataclass
class Verdict:
    """What became of a row."""

    row: int
    promise: str
    kills: list[tuple[int, float]] = field(default_factory=list)
    """At which of its writes it was killed, and how long after, seconds."""
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    """What is not as it should be."""


def promise(row: Row) -> str:
    """What a run that was killed shares with one that never was.

    `equal`: all but what a clock says. `aged`: all but which weights wrote which line. `whole`: each step once, and the
    same files: its rollouts do not repeat, because the clock says which are done first, or which others go on beside
    them.
    """
    ahead, repeats = row["ahead"] != "0", row["engine"] == "clerk" or row["concurrency"] == "1"
    if row["groups"] == "window":
        return "whole"
    if ahead:
        return "aged" if row["engine"] == "clerk" else "whole"
    return "equal" if repeats else "whole"


def judge(number: int, out: Path, seed: int) -> Verdict:
    """Train a row undisturbed, and killed and resumed, and compare."""
    row, began_s = table()[number], time.monotonic()
    verdict = Verdict(number, promise(row))
    place, rng = out / f"{number:02}", random.Random(f"{seed} {number}")
    place.mkdir()
    command = words(row, out)
    command += ["--out", str(place), "--name"]
    code = train([*command, "whole"], place / "whole.log")
    if code:
        verdict.wrong.append(f"undisturbed it ended with {code}: {last_lines(place / 'whole.log')}")
    else:
        writes = int((place / "whole.count").read_text())
        while True:
            kill_at, after_s = None, rng.choice((0.0, rng.uniform(0, 0.3)))
            if not verdict.kills:
                kill_at = rng.randrange(1, writes * 4 // 5)
            elif len(verdict.kills) < 2 and rng.random() < 0.5:
                kill_at = rng.randrange(1, writes)
            log = place / "killed.log"
            code = train([*command, "killed", "--resume"], log, kill_at, after_s)
            if code == -signal.SIGKILL and kill_at is not None:
                verdict.kills.append((kill_at, round(after_s, 3)))
            else:
                break
        if [*place.glob(f"*{ADDRESSES}")]:
            verdict.promise = "whole"
        verdict.wrong += [f"resumed it ended with {code}: {last_lines(log)}"] if code else []
        verdict.wrong += [] if code else differences(place / "killed", place / "whole", verdict.promise)
    verdict.seconds = round(time.monotonic() - began_s, 1)
    return verdict


def last_lines(log: Path) -> str:
    """The end of what a training said."""
    return log.read_text()[-1500:]


def differences(run: Path, whole: Path, promised: str) -> list[str]:
    """What of `run` is not as in `whole`, though it was promised."""
    places, found = (run, whole), []
    mine, theirs = (files_of(place) for place in places)
    if mine != theirs:
        found.append(f"other files: {sorted(mine ^ theirs)}")
    rows = [[json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()] for place in places]
    found += [f"steps {steps}" for one in rows if (steps := [row["step"] for row in one]) != list(range(1, STEPS + 1))]
    ends = [find_newest_state(place / "states") for place in places]
    if [end.step if end else None for end in ends] not in ([STEPS, STEPS], [None, None]):
        found.append(f"states {ends}")
    summaries = [json.loads((place / "summary.json").read_text()) for place in places]
    found += [f"status {one['status']}" for one in summaries if one["status"] != "finished"]
    if promised == "whole" or found:
        return found
    aged = promised == "aged"
    but = (CLOCKED | AGED) if aged else set()
    told = [[without_times(row, but) for row in one] for one in rows]
    found += [f"step {n}: {unlike(*pair)}" for n, pair in enumerate(zip(*told, strict=True), 1) if pair[0] != pair[1]]
    played = [rollouts_without_times(read_trajectories(place / "trajectories")) for place in places]
    if aged:
        played = [list(map(ageless, one)) for one in played]
    found += ["other rollouts"] if played[0] != played[1] else []
    if ends[0] and ends[1]:
        found += [] if same(ends[0].load_tensors(), ends[1].load_tensors()) else ["other state"]
        if not aged and ends[0].metadata["parts"] != ends[1].metadata["parts"]:
            found.append(f"other memories: {unlike(*(json.loads(end.metadata['parts']) for end in ends if end))}")
    for name in sorted(mine):
        if name.endswith((".safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")):
            found += [] if alike(run / name, whole / name) else [f"other {name}"]
    summaries = [without_times(one, {"resumed_at_steps"}) for one in summaries]
    found += [f"summary: {unlike(*summaries)}"] if not aged and summaries[0] != summaries[1] else []
    return found


def alike(one: Path, other: Path) -> bool:
    """Whether two files hold the same: bytes of weights, tensors of others, whose files may differ."""
    if one.suffix == ".safetensors":
        return one.read_bytes() == other.read_bytes()
    mine, theirs = (plain(torch.load(file, weights_only=False)) for file in (one, other))
    return find_difference(mine, theirs) == ""


def plain(value: object) -> object:
    """A saved value with arrays as tensors."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.astype(np.int64))
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def files_of(run: Path) -> set[str]:
    """Names of a run's files, without states, of which only the newest ones are there, and events, which have hosts."""
    return {
        name
        for file in run.rglob("*")
        if not (name := file.relative_to(run).as_posix()).startswith(("states/0", "tensorboard/"))
    }


def without_times(row: Mapping[str, object], but: Set[str]) -> dict[str, object]:
    """A row without what a clock says, nor the entries `but`."""
    return {key: value_without_times(value) for key, value in row.items() if not (key.endswith("_s") or key in but)}


def unlike(mine: Mapping[str, object], theirs: Mapping[str, object]) -> str:
    """In which entries two rows differ."""
    return "; ".join(
        f"{key} {mine.get(key)!r:.80} for {theirs.get(key)!r:.80}"
        for key in sorted({*mine, *theirs})
        if mine.get(key) != theirs.get(key)
    )


def main(out: Path, numbers: Sequence[int], seed: int) -> None:
    use_one_thread()
    ENGINES.register(Clerk)
    prepare(out)
    parse(TrainConfig, "train", words(table()[0], out)[1:])  # fills caches of what reads command lines
    for number in numbers:
        print(json.dumps(asdict(judge(number, out, seed))), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(word) for word in sys.argv[3:]], int(sys.argv[2]))

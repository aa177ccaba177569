"""Write the tables about the space after a prompt into benchmarks/results/templates.md and docs/templates.md.

    python -m benchmarks.models.prompt_space              the form that each vocabulary of the tests gets
    python -m benchmarks.models.prompt_space MODEL ...    and the cost of first tokens (folders or GGUF files)

A model reads doctests of the standard library as console sessions: with the space observed, with the space sampled, and
as whole texts, tokenised in one piece. Each line's first token has a log probability in
each of the three.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM

from benchmarks.generated_blocks import RESULTS, ROOT, Block
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.rollout_config import RolloutConfig
from repl_rl.sft.demonstrations_from_doctests import STDLIB, DocstringTest, iterate_doctests
from repl_rl.trajectory.console_text import PS1, PS2
from repl_rl.trajectory.trajectory import Observed, Prompt
from tests.support.vocabularies import VOCABULARIES

PAGE = Block(RESULTS / "templates.md", "models/prompt_space")
SUMMARY = Block(ROOT / "docs" / "templates.md", "models/prompt_space")
FIGURES = ROOT / "benchmarks" / "results" / "prompt_space.json"
TRANSCRIPTS = 40
MOST_IDS = 512


def forms() -> dict[str, dict[str, str]]:
    """Return the form of each vocabulary of the tests, with the tokens of a prompt and a line."""
    found = {}
    for name, write in VOCABULARIES.items():
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder))
            renderer = Renderer.from_folder(folder)
            ids = renderer.encode("\n>>> print(x)\n")
            tokens = " ".join(f"`{renderer.decode((i,))!r}`" for i in ids)
            found[name] = {"form": "sampled" if renderer.samples_space else "observed", "tokens": tokens}
    return found


def transcripts() -> list[DocstringTest]:
    """Doctests of at least four statements, spread over the standard library."""
    found = [one for one in iterate_doctests(STDLIB) if len(one.examples) >= 4]
    return found[:: max(1, len(found) // TRANSCRIPTS)][:TRANSCRIPTS]


def session(specimen: DocstringTest, renderer: Renderer) -> tuple[list[int], list[int], str]:
    """Ids of a session, the places of its lines' first tokens, and all that it says as ids have it."""
    before: Prompt | Observed = renderer.build_plain_prompt(f"# {specimen.question}\n{PS1}")
    ids, firsts = list(before.token_ids), list[int]()
    for example in specimen.examples:
        for number, line in enumerate(example.lines):
            last = number == len(example.lines) - 1
            written = renderer.encode_as_sampled(f"{line}\n", before)
            if line:
                firsts.append(len(ids))
            ids += written
            before = renderer.encode_observation(f"{example.expected_output}{PS1}" if last else PS2)
            ids += before.token_ids
    return ids, firsts, renderer.decode(ids)


def costs(model: str) -> dict[str, float | int]:
    """Nats that lines' first tokens cost a model in each of the three ways, in the mean over lines."""
    folder = RolloutConfig(model=model).model_folder
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    asked = {form: Renderer.from_folder(folder, prompt_space=form) for form in ("observed", "sampled")}
    nats: dict[str, list[float]] = {"observed": [], "sampled": [], "whole": []}
    for specimen in transcripts():
        for form, renderer in asked.items():
            ids, firsts, text = session(specimen, renderer)
            nats[form] += _nats(network, ids, firsts)
        renderer = asked["sampled"]
        # The whole text is that of the sampled form, whose lines begin with their space.
        starts = {len(renderer.decode(ids[:at])) for at in firsts if at < MOST_IDS}
        whole = renderer.encode(text)
        places = [n for n in range(min(len(whole), MOST_IDS)) if len(renderer.decode(whole[:n])) in starts]
        nats["whole"] += _nats(network, whole, places)
    return {"lines": len(nats["sampled"]), **{name: fmean(values) for name, values in nats.items()}}


@torch.no_grad()
def _nats(network: torch.nn.Module, ids: Sequence[int], places: Sequence[int]) -> list[float]:
    shown = torch.tensor([ids[:MOST_IDS]])
    logprobs = network(input_ids=shown).logits[0].log_softmax(-1)
    return [-float(logprobs[at - 1, ids[at]]) for at in places if 0 < at < MOST_IDS]


def block(figures: dict[str, dict[str, dict[str, str]]]) -> str:
    """Return the table of vocabularies."""
    rows = "".join(f"| {name} | {one['form']} | {one['tokens']} |\n" for name, one in figures["forms"].items())
    return f"| vocabulary | the space is | a prompt and a line in its tokens |\n|---|---|---|\n{rows}"


def summary(figures: dict[str, dict[str, dict[str, str]]]) -> str:
    """Return the table of models, with the cost of first tokens."""
    costly = "".join(
        f"| {name} | {one['lines']} | {one['observed']:.2f} | {one['sampled']:.2f} | {one['whole']:.2f} |\n"
        for name, one in figures["costs"].items()
    )
    head = "| model | lines | space observed | space sampled | whole text |\n|---|---|---|---|---|\n"
    return f"Nats of a line's first token, mean over lines:\n\n{head}{costly}"


def main(models: Sequence[str]) -> None:
    """See the top of this file."""
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {"costs": {}}
    figures["forms"] = forms()
    for model in models:
        name, _, said = model.partition("=")
        figures["costs"][name] = costs(said or name)
        print(name, figures["costs"][name], flush=True)
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    PAGE.write(block(figures))
    SUMMARY.write(summary(figures))


if __name__ == "__main__":
    main(sys.argv[1:])

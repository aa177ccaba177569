"""Whether a run's rollouts share their prefixes in the update: only while that is seen to change nothing.

A model is tried when training begins, and on the rollouts of its first step: see `likeness`.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from repl_rl.trainer.likeness import FORBIDDEN, Autocast, Distance, compare, floors, lowered, nats
from repl_rl.trainer.paths import NAME, common
from repl_rl.trainer.scoring import Laid, Scores, Tally, most, trees

_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers in which a token knows of earlier ones by attention alone."""
_AROUND = 128
"""Tokens before and after rows part, of which gradients are compared in a step."""
_SEVERAL = 3
"""Rows whose gradients are compared in a step."""
Score = Callable[[Tensor, int, Tally | None], Scores]
"""Scores some rows of a step: their numbers, tokens in a pass, and whether they share."""


class Sharing:
    """The decision, for one run."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """`tell` is given a line where prefixes are not shared because a model does not fit."""
        self.tally = Tally()
        """Of the first scoring of the step at hand."""
        self.off = False
        """True: from now on each row is scored whole."""
        self._tell = tell
        self._told = ""
        self._checked = 0
        self._bare: PreTrainedModel | None = None

    def install(self, model: PreTrainedModel) -> None:
        """Give `model` attention over paths, for good, if it can have it: before it is copied, wrapped or sharded."""
        why = unfit(model)
        if why is None:
            model.set_attn_implementation(NAME)
        else:
            self._end(model, why)

    @torch.no_grad()
    def probe(self, model: PreTrainedModel, autocast: Autocast) -> None:
        """Try `model`, which can be called for scores, on a small tree: log probabilities and gradients."""
        self._bare = model
        if self.off:
            return
        rows = _example(model)
        scored = [torch.arange(len(row)) > 0 for row in rows]
        # In float32 first, where its weights are that: rounding in a lower format would hide a mistake.
        exact = [nullcontext] if model.dtype is not lowered(model, autocast) else []
        for how in (*exact, autocast):
            if not self.off:
                self._judge(model, self._compared(model, rows, scored, how))

    @torch.no_grad()
    def verify(
        self, score: Score, batch: tuple[Tensor, Tensor, Tensor], learning: Tensor, tokens: int, autocast: Autocast
    ) -> None:
        """Try this step's longest tree, if its rows are longer than any that were tried, twice as long from then on.

        All processes call this together; what one of them finds holds for all.

        Args:
            score: scores rows of the step.
            batch: its ids, attention and scored tokens, as `score_rows` takes them.
            learning: (B,) bool, the rows that the loss depends on, which are scored apart from the others.
            tokens: in a pass, about.
        """
        self.tally = Tally()
        model = self._bare
        assert model is not None
        laid = Laid.of(*batch)
        longer = not self.off and int(laid.lengths.max()) > 2 * self._checked
        sets = (learning, ~learning) if longer else ()
        length, members = max((_longest(laid, rows.nonzero()[:, 0], tokens) for rows in sets), default=(0, []))
        if not most(int(length > 2 * self._checked), laid.ids.device):
            return
        rows = torch.tensor(members, dtype=torch.long, device=laid.ids.device)
        # Two rows in a pass at least, or there is nothing to take the tolerance from.
        single, several = score(rows, 1, None), score(rows, max(tokens, 2 * length), None)
        shared = score(rows, tokens, Tally())
        found = [nats(single.logprobs, shared.logprobs, several.logprobs, floors(model, autocast)[0])]
        if members and not any(isinstance(weight, DTensor) for weight in model.parameters()):
            found += self._compared(model, *_around(laid, rows[:_SEVERAL]), autocast)
        self._checked = max(self._checked, length)
        self._judge(model, found)
        if most(int(self.off), laid.ids.device) and not self.off:
            self._end(model, "another process found that it does not fit")

    def metrics(self, accelerator: Accelerator) -> dict[str, float]:
        """Names as in `metrics.jsonl`, over all processes, which call this together."""
        counts = torch.tensor([[self.tally.rows, self.tally.trees, self.tally.shared]], device=accelerator.device)
        rows, in_trees, shared = accelerator.gather(counts).sum(dim=0).tolist()
        return {"token_ratio": rows / in_trees if in_trees else 1.0, "shared_tokens": shared / max(rows, 1)}

    def memory(self) -> str:
        """What was found so far, as JSON."""
        return json.dumps({"told": self._told, "checked": self._checked})

    def remember(self, memory: str) -> None:
        """Go on from what `memory` gave."""
        found = json.loads(memory)
        self._checked = found["checked"]
        if found["told"] and not self.off:
            self._say(found["told"])

    def _compared(
        self, model: PreTrainedModel, rows: list[list[int]], scored: list[Tensor], autocast: Autocast
    ) -> list[Distance]:
        try:
            return compare(model, rows, scored, autocast)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            self._end(model, f"it does not take a tree: {str(error).partition(chr(10))[0] or repr(error)}")
            return []

    def _judge(self, model: PreTrainedModel, found: Sequence[Distance]) -> None:
        wrong = next((one.wrong for one in found if one.wrong is not None), None)
        if wrong is not None and not self.off:
            self._end(model, wrong)

    def _end(self, model: PreTrainedModel, why: str) -> None:
        self._say(f"shared prefixes off: {model.config.model_type}: {why}; each row is scored whole")

    def _say(self, what: str) -> None:
        self.off, self._told = True, what
        self._tell(what)


def unfit(model: PreTrainedModel) -> str | None:
    """What of a model is known not to go with trees; None: nothing."""
    text = model.config.get_text_config()
    strange = sorted(set(getattr(text, "layer_types", None) or ()) - _LAYERS)
    if strange:
        return f"it has layers of {', '.join(strange)}"
    how = str(text._attn_implementation)
    if how not in ("sdpa", NAME):
        return f"its attention is {how}, and trees take sdpa"
    if not model._can_set_attn_implementation():
        return "its attention cannot be replaced"
    for module in model.modules():
        share = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        if isinstance(share, float) and share > 0:
            return "it drops out at random, and rows would share what is drawn"
    return None


def _example(model: PreTrainedModel) -> list[list[int]]:
    """Three rows that part twice, of tokens that the policy may sample."""
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    count = model.config.get_text_config().vocab_size
    allowed = torch.arange(count) if bias is None else (bias.detach().cpu()[:count] > FORBIDDEN).nonzero()[:, 0]
    drawn = allowed[torch.randint(len(allowed), (72,), generator=torch.Generator("cpu").manual_seed(0))].tolist()
    root, stem, *leaves = (drawn[a:b] for a, b in pairwise((0, 16, 32, 40, 52, 72)))
    return [[*root, *stem, *leaves[0]], [*root, *stem, *leaves[1]], [*root, *leaves[2]]]


def _longest(laid: Laid, rows: Tensor, tokens: int) -> tuple[int, list[int]]:
    """Tokens of the longest row of a tree, and the rows of that tree; 0 and none where there is no tree."""
    found, _ = trees(laid, rows, tokens, Tally())
    return max(((max(map(len, tree.where)), members) for tree, members in found), default=(0, []))


def _around(laid: Laid, rows: Tensor) -> tuple[list[list[int]], list[Tensor]]:
    """What rows have before and after they part, with its scored tokens."""
    texts, firsts = laid.texts(rows), laid.first[rows].tolist()
    parting = min((common(one, other) for one, other in pairwise(texts)), default=len(texts[0]))
    begin = max(0, parting - _AROUND)
    cut = [text[begin : parting + _AROUND] for text in texts]
    marks = []
    for row, first, text in zip(rows.tolist(), firsts, cut, strict=True):
        mine = laid.sampled[row, first + begin : first + begin + len(text)].cpu().clone()
        mine[:1] = False  # nothing is left to predict it
        marks.append(mine)
    return cut, marks

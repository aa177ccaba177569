"""Prefix sharing in the update, used only as long as checks find that it changes nothing.

A model is checked when training begins, on the rollouts of its first step, and when rollouts get much longer: see
`likeness`.
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
"""Kinds of layers in which a token depends on earlier tokens by attention alone."""
_AROUND = 128
"""Tokens before and after the branch point of rows whose gradients are compared in a step."""
_SEVERAL = 3
"""Number of rows whose gradients are compared in a step."""
Score = Callable[[Tensor, int, Tally | None], Scores]
"""Function that scores rows of a step, by their numbers, tokens per pass, and a tally if they share prefixes."""


class Sharing:
    """Decision of one run on prefix sharing, with its checks."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """The warning callback receives a line if prefixes are not shared because a model does not fit."""
        self.tally = Tally()
        """Token counts of the first scoring of the current step."""
        self.off = False
        """True if each row is scored whole from now on."""
        self._tell = tell
        self._told = ""
        self._checked = 0
        self._bare: PreTrainedModel | None = None

    def install(self, model: PreTrainedModel) -> None:
        """Set tree attention in `model`, if it fits; call this before the model is copied, wrapped or sharded."""
        why = unfit(model)
        if why is None:
            model.set_attn_implementation(NAME)
        else:
            self._end(model, why)

    @torch.no_grad()
    def probe(self, model: PreTrainedModel, autocast: Autocast) -> None:
        """Check log probabilities and gradients of `model`, after `scoring.install`, on a small tree."""
        self._bare = model
        if self.off:
            return
        rows = _example(model)
        scored = [torch.arange(len(row)) > 0 for row in rows]
        # Weights in float32 are checked in float32 first: rounding in a lower format would hide a mistake.
        exact = [nullcontext] if model.dtype is not lowered(model, autocast) else []
        for how in (*exact, autocast):
            if not self.off:
                self._judge(model, self._compared(model, rows, scored, how))

    @torch.no_grad()
    def verify(
        self, score: Score, batch: tuple[Tensor, Tensor, Tensor], learning: Tensor, tokens: int, autocast: Autocast
    ) -> None:
        """Check this step's longest tree, if it is the first one or more than twice as long as all checked ones.

        All processes call this together; a failed check of one process turns sharing off in all.

        Args:
            score: scores rows of the step.
            batch: ids, attention and scored tokens of the step, as `score_rows` takes them.
            learning: (B,) bool, the rows that the loss depends on; they are scored separately from the others.
            tokens: approximate number of tokens per pass.
            autocast: gives the number format of a forward pass.
        """
        self.tally = Tally()
        model = self._bare
        assert model is not None
        laid = Laid.of(*batch)
        longer = not self.off and int(laid.lengths.max()) > 2 * self._checked
        sets = (learning, ~learning) if longer else ()
        length, members = max((_longest(laid, rows.nonzero()[:, 0], tokens) for rows in sets), default=(0, []))
        # If one process checks, all do, because scoring is collective.
        if not most(int(length > 2 * self._checked), laid.ids.device):
            return
        rows = torch.tensor(members, dtype=torch.long, device=laid.ids.device)
        # At least two rows per pass: the tolerance is their distance from one row per pass.
        single, several = score(rows, 1, None), score(rows, max(tokens, 2 * length), None)
        shared = score(rows, tokens, Tally())
        found = [nats(single.logprobs, shared.logprobs, several.logprobs, floors(model, autocast)[0])]
        # Gradients are compared only if this process has all weights.
        if members and not any(isinstance(weight, DTensor) for weight in model.parameters()):
            found += self._compared(model, *_around(laid, rows[:_SEVERAL]), autocast)
        self._checked = max(self._checked, length)
        self._judge(model, found)
        if most(int(self.off), laid.ids.device) and not self.off:
            self._end(model, "another process found that it does not fit")

    def metrics(self, accelerator: Accelerator) -> dict[str, float]:
        """Return metrics under their names in `metrics.jsonl`, over all processes, which call this together."""
        counts = torch.tensor([[self.tally.rows, self.tally.trees, self.tally.shared]], device=accelerator.device)
        rows, in_trees, shared = accelerator.gather(counts).sum(dim=0).tolist()
        return {"token_ratio": rows / in_trees if in_trees else 1.0, "shared_tokens": shared / max(rows, 1)}

    def memory(self) -> str:
        """Return the results of all checks so far, as JSON."""
        return json.dumps({"told": self._told, "checked": self._checked})

    def remember(self, memory: str) -> None:
        """Restore the state that `memory` returned."""
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
    """Return a reason that a model does not fit trees, or None if no reason is known."""
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
    """Return three rows with two branch points, of tokens that the policy may sample."""
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    count = model.config.get_text_config().vocab_size
    allowed = torch.arange(count) if bias is None else (bias.detach().cpu()[:count] > FORBIDDEN).nonzero()[:, 0]
    drawn = allowed[torch.randint(len(allowed), (72,), generator=torch.Generator("cpu").manual_seed(0))].tolist()
    root, stem, *leaves = (drawn[a:b] for a, b in pairwise((0, 16, 32, 40, 52, 72)))
    return [[*root, *stem, *leaves[0]], [*root, *stem, *leaves[1]], [*root, *leaves[2]]]


def _longest(laid: Laid, rows: Tensor, tokens: int) -> tuple[int, list[int]]:
    """Return the length of the longest row in any tree, and the rows of that tree; without trees, 0 and no rows."""
    found, _ = trees(laid, rows, tokens, Tally())
    return max(((max(map(len, tree.where)), members) for tree, members in found), default=(0, []))


def _around(laid: Laid, rows: Tensor) -> tuple[list[list[int]], list[Tensor]]:
    """Return the ids of rows around their branch point, and the scored tokens among them."""
    texts, firsts = laid.texts(rows), laid.first[rows].tolist()
    parting = min((common(one, other) for one, other in pairwise(texts)), default=len(texts[0]))
    begin = max(0, parting - _AROUND)
    cut = [text[begin : parting + _AROUND] for text in texts]
    marks = []
    for row, first, text in zip(rows.tolist(), firsts, cut, strict=True):
        mine = laid.sampled[row, first + begin : first + begin + len(text)].cpu().clone()
        # The token that predicts the first one is cut off.
        mine[:1] = False
        marks.append(mine)
    return cut, marks

"""One decoding step for many rows of different lengths: the arithmetic of the transformers engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from repl_rl.engine.arena import Arena, refuse_unkept, takes_states_alone
from repl_rl.engine.checkpoint import checkpoint_files
from repl_rl.engine.forbidden import forbid
from repl_rl.engine.logits import Logits, attention
from repl_rl.engine.names import causal_class, read_config, renewed
from repl_rl.errors import EngineError
from repl_rl.machine.launched import own_gpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class Row:
    """What a session wants to be fed in the next step."""

    slot: int
    ids: list[int]
    """Every id of the session. The decoder only reads it."""
    computed: int
    """Number of `ids` that have been fed and have keys, values and states in the arena; fewer than all."""
    temperature: float
    generator: torch.Generator | None
    """Of this session alone; None draws from the engine's own stream."""
    mark: int = 0
    """`computed` when its call began, to which `undo` may go back."""


@dataclass(frozen=True, slots=True)
class Feed:
    """The ids that the next forward gets of a row. A copy: the session may go on with the row meanwhile."""

    slot: int
    start: int
    """Number of ids before them."""
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Draw:
    """One sampled id and its log probability in nats under the raw policy."""

    token_id: int
    logprob: float


class Decoder:
    """A causal language model with an arena of keys, values and recurrent states."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        seed: int,
        forbidden_ids: frozenset[int] = frozenset(),
        device: torch.device | None = None,
    ) -> None:
        """`device` None: this process's GPU; the CPU where there is none."""
        self.device = own_device() if device is None else device
        chosen = DTYPES[("float32" if self.device.type == "cpu" else "bfloat16") if dtype == "auto" else dtype]
        found = read_config(folder)
        how = attention(*causal_class(found))
        loaded = AutoModelForCausalLM.from_pretrained(folder, config=found, dtype=chosen, attn_implementation=how)
        self.model: PreTrainedModel = loaded.to(self.device).eval()
        self._forbidden_ids = forbidden_ids
        forbid(self.model, forbidden_ids)
        self._logits = Logits.of(self.model.config)
        self._states_alone = takes_states_alone(type(self.model))
        self.arena = Arena(self.model.config, chosen, self.device)
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def generator_for(self, seed: int) -> torch.Generator:
        """A random stream for one session."""
        return torch.Generator(self.device).manual_seed(seed)

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> list[Draw]:
        """Feed each row what is not computed yet and draw one id for each, in order.

        Rows with one id to feed and rows with several go through the model separately, so that one long prompt
        does not pad everybody. Of a model with recurrent states, which padding would enter, only rows with equal
        numbers of ids to feed go together.
        """
        draws: dict[int, Draw] = {}
        feeds = [self.feed(row) for row in rows]
        for part in self.parts(feeds):
            logprobs = self.logprobs([feeds[index] for index in part])
            draws.update(zip(part, self._draw([rows[index] for index in part], logprobs), strict=True))
        return [draws[index] for index in range(len(rows))]

    def feed(self, row: Row) -> Feed:
        """Return the ids of a row that are not computed yet."""
        start = self.arena.resume(row.slot, row.computed, row.mark)
        return Feed(row.slot, start, row.ids[start:])

    def parts(self, feeds: Sequence[Feed]) -> list[list[int]]:
        """The numbers of those that go through the model together, the ones with a single id first."""
        parts: dict[tuple[int, bool], list[int]] = {}
        for index, feed in enumerate(feeds):
            count = len(feed.ids)
            key = (min(count, 2), False) if self.arena.padded else (count, feed.start == 0)
            parts.setdefault(key, []).append(index)
        return [parts[key] for key in sorted(parts)]

    def load(self, folder: Path) -> None:
        """Replace the weights by those of the checkpoint in `folder`.

        Raises:
            EngineError: there is none, or it does not have exactly this model's weights.
        """
        files = checkpoint_files(folder)
        try:
            state = {name: w for file in files for name, w in load_file(file, device=str(self.device)).items()}
            fresh = renewed(self.model, state)
        except (EngineError, SafetensorError) as error:
            raise EngineError(f"{folder} does not fit the open model: {error}") from error
        forbid(fresh, self._forbidden_ids)
        self.model = fresh

    def logprobs(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Log probabilities (B, V) of the id after each of them, which one of `parts` names."""
        if self.arena.one_by_one and feeds[0].start:
            for number in range(len(feeds[0].ids)):
                last = self._forward([Feed(f.slot, f.start + number, f.ids[number : number + 1]) for f in feeds])
        else:
            last = self._forward(feeds)
        return torch.log_softmax(self._logits(self.model.get_output_embeddings()(last)).float(), dim=-1)

    def _forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """The last hidden state (B, H) of each of them."""
        lengths = [len(feed.ids) for feed in feeds]
        longest = max(lengths)
        positions, mask = self.arena.aim([feed.slot for feed in feeds], [feed.start for feed in feeds], lengths)
        padded = [[*feed.ids, *[feed.ids[-1]] * (longest - len(feed.ids))] for feed in feeds]
        told = {"attention_mask": mask, "position_ids": positions, "past_key_values": self.arena}
        if self._states_alone:
            told = {"cache_params": self.arena}
        ids = torch.tensor(padded, device=self.device)
        hidden: torch.Tensor = self.model.base_model(input_ids=ids, use_cache=True, **told).last_hidden_state
        self.arena.settle()
        return hidden[torch.arange(len(feeds), device=self.device), torch.tensor(lengths, device=self.device) - 1]

    def _draw(self, rows: Sequence[Row], logprobs: torch.Tensor) -> list[Draw]:
        # argmax(p / e) with e exponential draws from p; greedy rows are left as they are
        noise = torch.empty_like(logprobs).exponential_(generator=self.generator)
        for index, row in enumerate(rows):
            if row.generator is not None:
                noise[index].exponential_(generator=row.generator)
        heat = torch.tensor([row.temperature for row in rows], device=self.device).unsqueeze(1)
        drawn = logprobs / heat.clamp(min=torch.finfo(torch.float32).tiny) - noise.log()
        chosen = torch.where(heat > 0, drawn, logprobs).argmax(dim=-1, keepdim=True)
        values = logprobs.gather(-1, chosen).squeeze(-1).clamp(max=0.0)
        return [Draw(*pair) for pair in zip(chosen.squeeze(-1).tolist(), values.tolist(), strict=True)]


def own_device() -> torch.device:
    """This process's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", own_gpu(torch.cuda.device_count()))


def refuse_undecodable(folder: Path) -> None:
    """Refuse a model that cannot be decoded here, from its configuration alone.

    Raises:
        ConfigError: transformers does not know it, or its past or its logits are of a kind that is not understood.
    """
    kind, config = causal_class(read_config(folder))
    refuse_unkept(kind, config)
    Logits.of(config)

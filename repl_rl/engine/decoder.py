"""One decoding step for many rows of different lengths, the core of the transformers engine."""

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
    """Input of one session for the next step."""

    slot: int
    ids: list[int]
    """All ids of the session. The decoder only reads them."""
    computed: int
    """Number of `ids` that were fed and have keys, values and states in the arena; fewer than all."""
    temperature: float
    generator: torch.Generator | None
    """Random stream of this session. None draws from the engine's stream."""
    mark: int = 0
    """Value of `computed` at the start of the current call, to which `undo` may go back."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Ids of a row for the next forward pass. They are a copy, because the session may change the row meanwhile."""

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
    """Causal language model with an arena of keys, values and recurrent states."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        seed: int,
        forbidden_ids: frozenset[int] = frozenset(),
        device: torch.device | None = None,
    ) -> None:
        """Load the model in `folder`. None as `device` means this process's GPU, or the CPU without a GPU."""
        self.device = own_device() if device is None else device
        chosen = DTYPES[("float32" if self.device.type == "cpu" else "bfloat16") if dtype == "auto" else dtype]
        found = read_config(folder)
        how = attention(*causal_class(found))
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, config=found, dtype=chosen, attn_implementation=how, trust_remote_code=False
        )
        self.model: PreTrainedModel = loaded.to(self.device).eval()
        self._forbidden_ids = forbidden_ids
        forbid(self.model, forbidden_ids)
        self._logits = Logits.of(self.model.config)
        self._states_alone = takes_states_alone(type(self.model))
        self.arena = Arena(self.model.config, chosen, self.device)
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def generator_for(self, seed: int) -> torch.Generator:
        """Return a random stream for one session."""
        return torch.Generator(self.device).manual_seed(seed)

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> list[Draw]:
        """Feed each row its ids that are not computed yet, and draw one id per row, in order.

        Rows with one id to feed and rows with several pass through the model separately, so that one long prompt does
        not pad all rows. Padding would become part of recurrent states. So in models with such states, only rows with
        equal numbers of ids to feed share a pass.
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
        """Return the indices of the feeds that share a forward pass, per pass. Feeds with a single id come first."""
        parts: dict[tuple[int, bool], list[int]] = {}
        for index, feed in enumerate(feeds):
            count = len(feed.ids)
            # With padding there are two passes: one id, or several. Recurrent states need equal counts, and all rows of
            # a pass either have an earlier state or none.
            key = (min(count, 2), False) if self.arena.padded else (count, feed.start == 0)
            parts.setdefault(key, []).append(index)
        return [parts[key] for key in sorted(parts)]

    def load(self, folder: Path) -> None:
        """Replace the weights by those of the checkpoint in `folder`.

        Raises:
            EngineError: there is no checkpoint, or it does not have exactly this model's weights.
        """
        # Build a second model, so that a failure leaves the open one unchanged.
        files = checkpoint_files(folder)
        try:
            state = {name: w for file in files for name, w in load_file(file, device=str(self.device)).items()}
            fresh = renewed(self.model, state)
        except (EngineError, SafetensorError) as error:
            raise EngineError(f"{folder} does not fit the open model: {error}") from error
        forbid(fresh, self._forbidden_ids)
        self.model = fresh

    def logprobs(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Return log probabilities (B, V) of the id after each feed. `feeds` is one of the `parts`."""
        if self.arena.one_by_one and feeds[0].start:
            # The scan would drop the state before several ids, so feed them one by one.
            for number in range(len(feeds[0].ids)):
                last = self._forward([Feed(f.slot, f.start + number, f.ids[number : number + 1]) for f in feeds])
        else:
            last = self._forward(feeds)
        return torch.log_softmax(self._logits(self.model.get_output_embeddings()(last)).float(), dim=-1)

    def _forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Return the last hidden state (B, H) of each feed."""
        lengths = [len(feed.ids) for feed in feeds]
        longest = max(lengths)
        positions, mask = self.arena.aim([feed.slot for feed in feeds], [feed.start for feed in feeds], lengths)
        # Repeat the last id as padding. Its result is ignored.
        padded = [[*feed.ids, *[feed.ids[-1]] * (longest - len(feed.ids))] for feed in feeds]
        told = {"attention_mask": mask, "position_ids": positions, "past_key_values": self.arena}
        if self._states_alone:
            told = {"cache_params": self.arena}
        ids = torch.tensor(padded, device=self.device)
        # Skip the model's own head: only the last position of a row needs logits.
        hidden: torch.Tensor = self.model.base_model(input_ids=ids, use_cache=True, **told).last_hidden_state
        self.arena.settle()
        return hidden[torch.arange(len(feeds), device=self.device), torch.tensor(lengths, device=self.device) - 1]

    def _draw(self, rows: Sequence[Row], logprobs: torch.Tensor) -> list[Draw]:
        # argmax(p / e) with exponential e draws from p. Greedy rows use their log probabilities unchanged.
        noise = torch.empty_like(logprobs).exponential_(generator=self.generator)
        for index, row in enumerate(rows):
            if row.generator is not None:
                # A seeded row must not depend on the rows that share its step.
                noise[index].exponential_(generator=row.generator)
        heat = torch.tensor([row.temperature for row in rows], device=self.device).unsqueeze(1)
        # Clamped, because greedy rows would divide by 0. Their result is not used.
        drawn = logprobs / heat.clamp(min=torch.finfo(torch.float32).tiny) - noise.log()
        chosen = torch.where(heat > 0, drawn, logprobs).argmax(dim=-1, keepdim=True)
        values = logprobs.gather(-1, chosen).squeeze(-1).clamp(max=0.0)
        return [Draw(*pair) for pair in zip(chosen.squeeze(-1).tolist(), values.tolist(), strict=True)]


def own_device() -> torch.device:
    """Return this process's GPU, or the CPU without a GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", own_gpu(torch.cuda.device_count()))


def refuse_undecodable(folder: Path) -> None:
    """Reject a model that this engine cannot decode, based on its configuration alone.

    Raises:
        ConfigError: transformers does not know the model, or its past or its logits are of an unsupported kind.
    """
    kind, config = causal_class(read_config(folder))
    refuse_unkept(kind, config)
    Logits.of(config)

"""Keys and values of many sessions in two tensors a layer, as a cache that a transformers model can write to."""

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from repl_rl.errors import ConfigError

GRAIN = 64
"""The arena grows by this many positions, so that it is seldom copied."""
FULL, WINDOWED = "full_attention", "sliding_attention"
_REMEDY = "the transformers engine keeps keys and values alone; use --engine vllm"

Masks = Tensor | Mapping[str, Tensor]
"""One mask for every layer, or one for each kind of layer."""


class Arena:
    """Slots x positions of keys and values. Each forward names its rows' slots and positions with `aim`.

    Positions past a row's own length hold rubbish; the attention mask that `aim` returns hides them, and where layers
    look back through a window, what lies before it.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        text = config.get_text_config()
        self.free: list[int] = []
        self._dtype, self._device = dtype, device
        self._kinds = set(getattr(text, "layer_types", None) or ())
        self._window: int | None = getattr(text, "sliding_window", None)
        self._slot_count = self._position_count = 0
        self._stores: dict[tuple[int, int], Tensor] = {}
        self._slots = torch.zeros(0, dtype=torch.long)
        self._positions = torch.zeros(0, dtype=torch.long)
        self._span = 0

    def take(self) -> int:
        """A slot that nobody holds."""
        if not self.free:
            slots = self._slot_count
            self._slot_count = max(8, 2 * slots)
            self.free.extend(range(self._slot_count - 1, slots - 1, -1))
        return self.free.pop()

    def give(self, slot: int) -> None:
        """Hand a slot back."""
        self.free.append(slot)

    def aim(self, slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, Masks]:
        """Say where the next forward writes: row b writes `lengths[b]` ids from position `starts[b]` of `slots[b]`.

        Returns:
            position ids (B, Q) and additive attention masks (B, 1, Q, K). Rows shorter than Q are padded on the
            right; what padding writes lies past the row's length and is overwritten by the row's next ids.
        """
        longest = max(lengths)
        first = torch.tensor(starts, device=self._device).unsqueeze(1)
        self._slots = torch.tensor(slots, device=self._device)
        self._positions = first + torch.arange(longest, device=self._device)
        self._span = max(starts) + longest
        if self._span > self._position_count:
            self._position_count = (self._span + GRAIN - 1) // GRAIN * GRAIN
        return self._positions, self._masks()

    def _masks(self) -> Masks:
        seen, now = torch.arange(self._span, device=self._device), self._positions.unsqueeze(-1)
        later = seen > now
        if self._window is None:
            return self._mask(later)
        gone = later | (seen <= now - self._window)
        if not self._kinds:  # every layer has the window
            return self._mask(gone)
        return {FULL: self._mask(later), WINDOWED: self._mask(gone)} if WINDOWED in self._kinds else self._mask(later)

    def _mask(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, torch.finfo(self._dtype).min).unsqueeze(1)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write (B, H, Q, D) keys and values where `aim` said; return all that these rows may look at, (B, H, K, D)."""
        return self._written(key_states, layer_idx, 0), self._written(value_states, layer_idx, 1)

    def _written(self, states: Tensor, layer: int, which: int) -> Tensor:
        store = self._store(states, layer, which)
        store[self._slots.unsqueeze(1), :, self._positions] = states.transpose(1, 2)
        return store[self._slots, :, : self._span]

    def _store(self, states: Tensor, layer: int, which: int) -> Tensor:
        """The tensor (slots, H, positions, D) that these states belong into; heads and widths differ by layer."""
        old = self._stores.get((layer, which))
        shape = (self._slot_count, states.size(1), self._position_count, states.size(3))
        if old is not None and old.shape == shape:
            return old
        store = states.new_zeros(shape, dtype=self._dtype)
        if old is not None:
            store[: old.size(0), :, : old.size(2)] = old
        self._stores[layer, which] = store
        return store

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows differ in length; positions are always given, so nothing may be derived from this."""
        return 0


def refuse_unkept(kind: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Refuse a model whose past is more than the keys and values of each layer.

    Raises:
        ConfigError: it keeps a running state, shares keys and values between layers, or attends in another way.
    """
    text = config.get_text_config()
    others = sorted(set(getattr(text, "layer_types", None) or ()) - {FULL, WINDOWED})
    if kind._is_stateful or others:
        what = ", ".join(others) or "a running state"
        raise ConfigError(f"model {kind.__name__} with layers", what, _REMEDY)
    shared = getattr(text, "num_kv_shared_layers", 0)
    if shared:
        raise ConfigError("num_kv_shared_layers", shared, _REMEDY)
    decoder = inspect.signature(kind.forward).parameters
    if "position_ids" not in decoder or "past_key_values" not in decoder:
        raise ConfigError("model", kind.__name__, f"its positions cannot be given; {_REMEDY}")

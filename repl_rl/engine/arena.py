"""Keys and values of many sessions in one tensor a layer, as a cache that a transformers model can write to."""

from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

GRAIN = 64
"""The arena grows by this many positions, so that it is seldom copied."""


class Arena:
    """Slots x positions of keys and values. Each forward names its rows' slots and positions with `aim`.

    Positions past a row's own length hold rubbish; the attention mask that `aim` returns hides them.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        heads = int(config.num_key_value_heads)
        width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.shape = (int(config.num_hidden_layers), 2, 0, heads, 0, width)
        self.store = torch.zeros(self.shape, dtype=dtype, device=device)
        self.free: list[int] = []
        self._slots = torch.zeros(0, dtype=torch.long)
        self._positions = torch.zeros(0, dtype=torch.long)
        self._span = 0

    def take(self) -> int:
        """A slot that nobody holds."""
        if not self.free:
            slots = self.store.shape[2]
            self._grow(max(8, 2 * slots), self.store.shape[4])
            self.free.extend(range(self.store.shape[2] - 1, slots - 1, -1))
        return self.free.pop()

    def give(self, slot: int) -> None:
        """Hand a slot back."""
        self.free.append(slot)

    def aim(self, slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Say where the next forward writes: row b writes `lengths[b]` ids from position `starts[b]` of `slots[b]`.

        Returns:
            position ids (B, Q) and an additive attention mask (B, 1, Q, K). Rows shorter than Q are padded on the
            right; what padding writes lies past the row's length and is overwritten by the row's next ids.
        """
        device, longest = self.store.device, max(lengths)
        first = torch.tensor(starts, device=device).unsqueeze(1)
        self._slots = torch.tensor(slots, device=device)
        self._positions = first + torch.arange(longest, device=device)
        self._span = max(starts) + longest
        if self._span > self.store.shape[4]:
            self._grow(self.store.shape[2], (self._span + GRAIN - 1) // GRAIN * GRAIN)
        hidden = torch.arange(self._span, device=device) > self._positions.unsqueeze(-1)
        mask = torch.zeros(hidden.shape, dtype=self.store.dtype, device=device)
        return self._positions, mask.masked_fill_(hidden, torch.finfo(mask.dtype).min).unsqueeze(1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (B, H, Q, D) keys and values where `aim` said; return all that these rows may look at, (B, H, K, D)."""
        keys, values = self.store[layer_idx]
        rows = self._slots.unsqueeze(1)
        keys[rows, :, self._positions] = key_states.transpose(1, 2)
        values[rows, :, self._positions] = value_states.transpose(1, 2)
        return keys[self._slots, :, : self._span], values[self._slots, :, : self._span]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows differ in length; positions are always given, so nothing may be derived from this."""
        return 0

    def _grow(self, slots: int, positions: int) -> None:
        layers, two, old_slots, heads, old_positions, width = self.store.shape
        store = self.store.new_zeros((layers, two, slots, heads, positions, width))
        store[:, :, :old_slots, :, :old_positions] = self.store
        self.store = store

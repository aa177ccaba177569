"""Keys and values of many sessions in two tensors per layer, as a cache that a transformers model can write to.

`recurrent` holds convolution and recurrent states, for models that have them.
"""

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from repl_rl.engine.recurrent import RUNNING, RecurrentStates
from repl_rl.errors import ConfigError

GRAIN = 64
"""Number of positions by which the arena grows, so that it is seldom copied."""
FULL, WINDOWED = "full_attention", "sliding_attention"
STATELESS = frozenset({"mlp", "moe"})
"""Kinds of layers that keep no state."""
_ONE_BY_ONE = frozenset({"falcon_mamba", "jamba", "mamba", "zamba"})
"""Models whose scan drops the previous state if several ids follow it (transformers 5.19, `mamba_selective_scan`)."""
_REMEDY = "the transformers engine keeps keys, values, convolution and recurrent states alone; use --engine vllm"

Masks = Tensor | Mapping[str, Tensor]
"""One mask for every layer, or one per kind of layer."""


class Arena:
    """KV cache of the transformers engine, slots x positions. A forward pass starts with `aim`, which selects the slots
    and positions of its rows, and ends with `settle`.

    Positions past the length of a row hold garbage. The attention mask that `aim` returns hides them. If layers have a
    sliding window, it also hides positions before the window.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        text = config.get_text_config()
        self.free: list[int] = []
        self._dtype, self._device = dtype, device
        self._kinds = set(getattr(text, "layer_types", None) or ())
        self._states = RecurrentStates(config)
        self.padded = not self._states.some
        """True if rows with different numbers of new ids may share a forward pass, with the shorter ones padded."""
        self.one_by_one = text.model_type in _ONE_BY_ONE
        """True if ids after a recurrent state must be fed one by one."""
        self._window: int | None = getattr(text, "sliding_window", None)
        self._slot_count = self._position_count = 0
        self._stores: dict[tuple[int, int], Tensor] = {}
        self._slots = torch.zeros(0, dtype=torch.long)
        self._positions = torch.zeros(0, dtype=torch.long)
        self._span = 0
        self._seen: Sequence[int] = ()

    def take(self) -> int:
        """Return a free slot."""
        if not self.free:
            # Double the number of slots. The tensors grow at their next write.
            slots = self._slot_count
            self._slot_count = max(8, 2 * slots)
            self.free.extend(range(self._slot_count - 1, slots - 1, -1))
        return self.free.pop()

    def give(self, slot: int) -> None:
        """Free a slot."""
        self._states.drop(slot)
        self.free.append(slot)

    def resume(self, slot: int, computed: int, mark: int) -> int:
        """Return the number of ids after which a session resumes: `computed`, or 0 if recurrent states saw other ids.

        `computed` ids of the session were fed, and the session may go back to `mark`.
        """
        return computed if self.padded else self._states.resume(slot, computed, mark)

    def aim(self, slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, Masks]:
        """Select where the next forward pass writes.

        Row b writes `lengths[b]` ids from position `starts[b]` of `slots[b]`.

        Returns:
            Position ids (B, Q) and additive attention masks (B, 1, Q, K). Rows shorter than Q are padded on the right.
            Padding is written past the row's length, and the row's next ids overwrite it.
        """
        longest = max(lengths)
        first = torch.tensor(starts, device=self._device).unsqueeze(1)
        self._slots = torch.tensor(slots, device=self._device)
        if not self.padded:
            assert min(lengths) == longest, "padding would enter recurrent states"
            self._seen = [start + longest for start in starts]
            self._states.load(self._slots, starts)
        self._positions = first + torch.arange(longest, device=self._device)
        # The span covers the padding of every row as well.
        self._span = max(starts) + longest
        if self._span > self._position_count:
            # Round up to a multiple of GRAIN.
            self._position_count = (self._span + GRAIN - 1) // GRAIN * GRAIN
        return self._positions, self._masks()

    def settle(self) -> None:
        """Keep the recurrent states that the forward pass after `aim` computed."""
        if not self.padded:
            self._states.store(self._slots, self._seen, self._slot_count)

    def _masks(self) -> Masks:
        seen, now = torch.arange(self._span, device=self._device), self._positions.unsqueeze(-1)
        later = seen > now
        # An id never attends to later ids, nor to ids that have left the window.
        if self._window is None:
            return self._mask(later)
        gone = later | (seen <= now - self._window)
        # Without `layer_types`, every layer has the window.
        if not self._kinds:
            return self._mask(gone)
        return {FULL: self._mask(later), WINDOWED: self._mask(gone)} if WINDOWED in self._kinds else self._mask(later)

    def _mask(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, torch.finfo(self._dtype).min).unsqueeze(1)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write (B, H, Q, D) keys and values where `aim` selected. Return (B, H, K, D), all that these rows may attend
        to."""
        return self._written(key_states, layer_idx, 0), self._written(value_states, layer_idx, 1)

    def _written(self, states: Tensor, layer: int, which: int) -> Tensor:
        store = self._store(states, layer, which)
        store[self._slots.unsqueeze(1), :, self._positions] = states.transpose(1, 2)
        return store[self._slots, :, : self._span]

    def _store(self, states: Tensor, layer: int, which: int) -> Tensor:
        """Return the tensor (slots, H, positions, D) for these states. Heads and widths differ per layer."""
        old = self._stores.get((layer, which))
        shape = (self._slot_count, states.size(1), self._position_count, states.size(3))
        if old is not None and old.shape == shape:
            return old
        # Copy the old content into a larger tensor.
        store = states.new_zeros(shape, dtype=self._dtype)
        if old is not None:
            store[: old.size(0), :, : old.size(2)] = old
        self._stores[layer, which] = store
        return store

    @property
    def layers(self) -> Sequence[LinearAttentionLayer]:
        """Convolution and recurrent states of the current rows, as models read and write them."""
        return self._states.layers

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return True if the current rows have earlier states in this layer. None means the last layer that has any."""
        had = self.layers[self._states.last if layer_idx is None else layer_idx].has_previous_state
        return all(had.values()) if state_idx is None else bool(had[state_idx])

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, **kwargs: int) -> Tensor:
        """Update the state as transformers' `Cache.update_conv_state` does."""
        updated: Tensor = self.layers[layer_idx].update_conv_state(conv_states, **kwargs)
        return updated

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, **kwargs: int) -> Tensor:
        """Update the state as transformers' `Cache.update_recurrent_state` does."""
        updated: Tensor = self.layers[layer_idx].update_recurrent_state(recurrent_states, **kwargs)
        return updated

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0. Rows differ in length and positions are always given, so nothing may depend on this value."""
        return 0


def refuse_unkept(kind: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Reject a model whose past is more than keys, values, convolution and recurrent states per layer.

    Raises:
        ConfigError: the model keeps a state elsewhere, shares keys and values between layers, has an unknown kind of
            layer, or takes no positions.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    others = sorted(kinds - {FULL, WINDOWED} - RUNNING - STATELESS)
    # MiniMax has layers of linear attention and its own cache, but is not stateful in transformers' sense.
    elsewhere = not kinds & RUNNING if kind._is_stateful else "linear_attention" in kinds
    if others or elsewhere:
        what = ", ".join(others) or "a running state outside of transformers' cache"
        raise ConfigError(f"model {kind.__name__} with layers", what, _REMEDY)
    shared = getattr(text, "num_kv_shared_layers", 0)
    if shared:
        raise ConfigError("num_kv_shared_layers", shared, _REMEDY)
    # Rows differ in length, so the model must accept explicit positions.
    decoder = inspect.signature(kind.forward).parameters
    if takes_states_alone(kind):
        return
    if "position_ids" not in decoder or "past_key_values" not in decoder:
        raise ConfigError("model", kind.__name__, f"its positions cannot be given; {_REMEDY}")


def takes_states_alone(kind: type[PreTrainedModel]) -> bool:
    """Return True if no layer attends. Such a model gets its states as `cache_params`, and no positions and no mask."""
    return "cache_params" in inspect.signature(kind.forward).parameters

"""Convolution and recurrent states of many sessions: one row per slot, in tensors per layer.

A recurrent state is a sum over all ids before it. It cannot be cut back, and padding would become part of it. So rows
that pass through the model together have equal numbers of new ids, and a session that takes a call back returns to a
copy of its state from before the call. Each forward gets cache layers of transformers' own, filled with the states of
its rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

Key = tuple[int, str, int]
"""Layer, `conv_states` or `recurrent_states`, and number of the state in the layer."""
_PARTS = ("conv_states", "recurrent_states")
RUNNING = frozenset({"linear_attention", "conv", "hybrid"})
"""Kinds of layers with a convolution state, a recurrent state, or both; `hybrid` ones have keys and values too."""


def keeps_running_state(kind: type[PreTrainedModel], config: PretrainedConfig) -> bool:
    """True where a model of `kind`, so configured, knows of earlier ids by more than keys and values."""
    layers = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return bool(kind._is_stateful or layers & RUNNING)


@dataclass(slots=True)
class Position:
    """Numbers of ids that a slot's state and the copy of an earlier one have seen."""

    seen: int = 0
    copied: int = 0
    """0: there is no copy. A state that has seen nothing needs none."""
    copies: dict[Key, Tensor] = field(default_factory=dict)


class RecurrentStates:
    """States of all slots. Each forward names its rows with `load` and ends with `store`."""

    def __init__(self, config: PretrainedConfig) -> None:
        kept = DynamicCache(config=config).layers
        self._counts = [
            layer.number_of_states if isinstance(layer, LinearAttentionCacheLayerMixin) else 0 for layer in kept
        ]
        self.layers: list[LinearAttentionLayer] = []
        """Those of the forward at hand, one per layer of the model. Layers without such states stay empty."""
        self._stores: dict[Key, Tensor] = {}
        self._positions: dict[int, Position] = {}

    @property
    def some(self) -> bool:
        """True where a layer has such states."""
        return any(self._counts)

    @property
    def last(self) -> int:
        """The last layer that has such states."""
        return max(number for number, count in enumerate(self._counts) if count)

    def drop(self, slot: int) -> None:
        """Forget a slot's state and its copy."""
        self._positions.pop(slot, None)

    def resume(self, slot: int, computed: int, mark: int) -> int:
        """Prepare a slot whose session has `computed` ids computed, and return after how many ids its state goes on.

        The result is `computed` if the state or its copy has seen that many ids, else 0: all ids must be fed again.
        While `computed` equals `mark`, to which the session may return, the state is copied.
        """
        position = self._positions.setdefault(slot, Position())
        if position.seen != computed and position.copied == computed:
            for key, copy in position.copies.items():
                self._stores[key][slot] = copy
            position.seen = computed
        if computed == 0 or position.seen != computed:
            self._positions[slot] = Position()
            return 0
        if computed == mark != position.copied:
            position.copied = mark
            position.copies = {key: store[slot].clone() for key, store in self._stores.items()}
        return computed

    def load(self, slots: Tensor, starts: Sequence[int]) -> None:
        """Fill `layers` with the states of `slots`, which have seen `starts` ids: all of them some, or none of them."""
        self.layers = [LinearAttentionLayer(count) for count in self._counts]
        if not any(starts):
            return
        assert all(starts), "rows that begin and rows that go on share a forward"
        for (number, part, state), store in self._stores.items():
            layer, rows = self.layers[number], store[slots]
            getattr(layer, part)[state] = rows
            if part == "conv_states":
                layer.conv_kernel_size[state] = rows.size(-1)
                layer.is_conv_states_initialized[state] = layer.has_previous_state[state] = True
            else:
                layer.is_recurrent_states_initialized[state] = True

    def store(self, slots: Tensor, seen: Sequence[int], slot_count: int) -> None:
        """Take the states of `slots`, of `slot_count` in all, from `layers`; they have seen `seen` ids now."""
        for key, rows in self._filled():
            store = self._stores.get(key)
            if store is None or len(store) < slot_count:
                grown = rows.new_zeros((slot_count, *rows.shape[1:]))
                if store is not None:
                    grown[: len(store)] = store
                store = self._stores[key] = grown
            store[slots] = rows.detach()
        for slot, count in zip(slots.tolist(), seen, strict=True):
            position = self._positions.get(slot)
            if position is not None:  # else its session was closed meanwhile
                position.seen = count

    def _filled(self) -> Iterator[tuple[Key, Tensor]]:
        for number, layer in enumerate(self.layers):
            for part in _PARTS:
                for state, rows in getattr(layer, part).items():
                    if rows is not None:
                        yield (number, part, state), rows

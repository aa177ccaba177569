"""Convolution and recurrent states of many sessions: one row per slot, in tensors per layer.

A recurrent state is a sum over all earlier ids. It cannot be shortened, and padding would become part of it. So rows
that share a forward pass have equal numbers of new ids. A session that takes a call back returns to a copy of its state
from before the call. Each forward pass gets cache layers of transformers, filled with the states of its rows.
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
"""Kinds of layers with a convolution state, a recurrent state, or both; `hybrid` layers have keys and values too."""


def keeps_running_state(kind: type[PreTrainedModel], config: PretrainedConfig) -> bool:
    """Return True if a model with this class and configuration stores more of earlier ids than keys and values."""
    layers = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return bool(kind._is_stateful or layers & RUNNING)


@dataclass(slots=True)
class Position:
    """Numbers of ids that the state of a slot, and the copy of an earlier state, have seen."""

    seen: int = 0
    copied: int = 0
    """Number of ids that the copy has seen. 0 means that there is no copy; a state that has seen no ids needs none."""
    copies: dict[Key, Tensor] = field(default_factory=dict)


class RecurrentStates:
    """States of all slots. A forward pass starts with `load`, which selects its rows, and ends with `store`."""

    def __init__(self, config: PretrainedConfig) -> None:
        kept = DynamicCache(config=config).layers
        self._counts = [
            layer.number_of_states if isinstance(layer, LinearAttentionCacheLayerMixin) else 0 for layer in kept
        ]
        self.layers: list[LinearAttentionLayer] = []
        """Cache layers of the current forward pass, one per layer of the model. Those without such states stay empty.
        """
        self._stores: dict[Key, Tensor] = {}
        self._positions: dict[int, Position] = {}

    @property
    def some(self) -> bool:
        """True if any layer has such states."""
        return any(self._counts)

    @property
    def last(self) -> int:
        """Number of the last layer that has such states."""
        return max(number for number, count in enumerate(self._counts) if count)

    def drop(self, slot: int) -> None:
        """Delete the state of a slot, and its copy."""
        self._positions.pop(slot, None)

    def resume(self, slot: int, computed: int, mark: int) -> int:
        """Prepare the slot of a session, and return the number of ids after which its state resumes.

        `computed` ids of the session are computed. The result is `computed` if the state or its copy has seen that many
        ids. Otherwise it is 0, and all ids must be fed again. While `computed` equals `mark`, to which the session may
        return, the state is copied.
        """
        position = self._positions.setdefault(slot, Position())
        if position.seen != computed and position.copied == computed:
            # A call was taken back: return to the copy.
            for key, copy in position.copies.items():
                self._stores[key][slot] = copy
            position.seen = computed
        if computed == 0 or position.seen != computed:
            # Neither the state nor the copy fits, so the session starts again.
            self._positions[slot] = Position()
            return 0
        if computed == mark != position.copied:
            position.copied = mark
            # A call starts here, and `undo` may come back.
            position.copies = {key: store[slot].clone() for key, store in self._stores.items()}
        return computed

    def load(self, slots: Tensor, starts: Sequence[int]) -> None:
        """Fill `layers` with the states of `slots`, which have seen `starts` ids. All of them have a state, or none."""
        self.layers = [LinearAttentionLayer(count) for count in self._counts]
        if not any(starts):
            return
        assert all(starts), "rows that begin and rows that go on share a forward"
        for (number, part, state), store in self._stores.items():
            layer, rows = self.layers[number], store[slots]
            getattr(layer, part)[state] = rows
            if part == "conv_states":
                # Flags that transformers sets itself when it fills a layer.
                layer.conv_kernel_size[state] = rows.size(-1)
                layer.is_conv_states_initialized[state] = layer.has_previous_state[state] = True
            else:
                layer.is_recurrent_states_initialized[state] = True

    def store(self, slots: Tensor, seen: Sequence[int], slot_count: int) -> None:
        """Save the states of `slots` from `layers`, after `seen` ids. `slot_count` is the number of all slots."""
        for key, rows in self._filled():
            store = self._stores.get(key)
            # New slots were added since the last pass.
            if store is None or len(store) < slot_count:
                grown = rows.new_zeros((slot_count, *rows.shape[1:]))
                if store is not None:
                    grown[: len(store)] = store
                store = self._stores[key] = grown
            store[slots] = rows.detach()
        for slot, count in zip(slots.tolist(), seen, strict=True):
            position = self._positions.get(slot)
            # Without a position, the session was closed meanwhile.
            if position is not None:
                position.seen = count

    def _filled(self) -> Iterator[tuple[Key, Tensor]]:
        for number, layer in enumerate(self.layers):
            for part in _PARTS:
                for state, rows in getattr(layer, part).items():
                    if rows is not None:
                        yield (number, part, state), rows

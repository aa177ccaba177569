"""KV cache of the transformers engine: keys, values and recurrent states of many sessions, one row per slot.

`KvCache` is a cache that a transformers model can write to. It has two tensors per layer for keys and values, and
`RecurrentStates` for the convolution and recurrent states of models that have them.

A recurrent state is a sum over all earlier ids. It cannot be shortened, and padding would become part of it. So rows
that share a forward pass have equal numbers of new ids. A session that takes a call back returns to a copy of its state
from before the call. Each forward pass gets cache layers of transformers, filled with the states of its rows.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from repl_rl.errors import ConfigError

StateKey = tuple[int, str, int]
"""Layer, `conv_states` or `recurrent_states`, and number of the state in the layer."""
_STATE_ATTRIBUTES = ("conv_states", "recurrent_states")
"""Attributes of transformers' cache layers that hold states."""
RUNNING = frozenset({"linear_attention", "conv", "hybrid"})
"""Kinds of layers with a convolution state, a recurrent state, or both; `hybrid` layers have keys and values too."""
FULL, WINDOWED = "full_attention", "sliding_attention"
"""Kinds of layers that keep keys and values, of all ids or of those in a window."""
STATELESS = frozenset({"mlp", "moe"})
"""Kinds of layers that keep no state."""
_SINGLE_TOKEN_MODELS = frozenset({"falcon_mamba", "jamba", "mamba", "zamba"})
"""Models whose scan drops the previous state if several ids follow it (transformers 5.19, `mamba_selective_scan`)."""
GRAIN = 64
"""Number of positions by which the cache grows, so that it is seldom copied."""
_REMEDY = "the transformers engine keeps keys, values, convolution and recurrent states alone; use --engine vllm"

AttentionMasks = Tensor | Mapping[str, Tensor]
"""One mask for every layer, or one per kind of layer."""


class KvCache:
    """KV cache of the transformers engine, slots x positions.

    A forward pass starts with `set_write_positions`, which selects the slots and positions of its rows, and ends with
    `commit_recurrent_states`.

    Positions past the length of a row hold garbage. The attention mask that `set_write_positions` returns hides them.
    If layers have a sliding window, it also hides positions before the window.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        text = config.get_text_config()
        self.free_slots: list[int] = []
        self._dtype, self._device = dtype, device
        self._kinds = set(getattr(text, "layer_types", None) or ())
        self._states = RecurrentStates(config)
        self.supports_padding = not self._states.has_states
        """True if rows with different numbers of new ids may share a forward pass, with the shorter ones padded."""
        self.single_token_steps = text.model_type in _SINGLE_TOKEN_MODELS
        """True if ids after a recurrent state must be fed one by one."""
        self._window: int | None = getattr(text, "sliding_window", None)
        self._slot_count = self._position_count = 0
        self._stores: dict[tuple[int, int], Tensor] = {}
        self._slots = torch.zeros(0, dtype=torch.long)
        self._positions = torch.zeros(0, dtype=torch.long)
        self._span = 0
        self._seen_ids: Sequence[int] = ()

    def allocate_slot(self) -> int:
        """Return a free slot."""
        if not self.free_slots:
            # Double the number of slots. The tensors grow at their next write.
            slots = self._slot_count
            self._slot_count = max(8, 2 * slots)
            self.free_slots.extend(range(self._slot_count - 1, slots - 1, -1))
        return self.free_slots.pop()

    def release_slot(self, slot: int) -> None:
        """Free a slot."""
        self._states.drop_slot(slot)
        self.free_slots.append(slot)

    def resume_slot(self, slot: int, computed: int, mark: int) -> int:
        """Return the number of leading ids that need not be fed again: `computed`, or 0 if no stored state fits.

        `computed` is the number of ids that were fed. `mark` is the number of ids to which `undo` may return.
        """
        return computed if self.supports_padding else self._states.resume_slot(slot, computed, mark)

    def set_write_positions(
        self, slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
    ) -> tuple[Tensor, AttentionMasks]:
        """Select where the next forward pass writes.

        Row b writes `lengths[b]` ids from position `starts[b]` of `slots[b]`.

        Returns:
            Position ids (B, Q) and additive attention masks (B, 1, Q, K). Rows shorter than Q are padded on the right.
            Padding is written past the row's length, and the row's next ids overwrite it.
        """
        longest = max(lengths)
        first = torch.tensor(starts, device=self._device).unsqueeze(1)
        self._slots = torch.tensor(slots, device=self._device)
        if not self.supports_padding:
            assert min(lengths) == longest, "padding would enter recurrent states"
            self._seen_ids = [start + longest for start in starts]
            self._states.load(self._slots, starts)
        self._positions = first + torch.arange(longest, device=self._device)
        # The span covers the padding of every row as well.
        self._span = max(starts) + longest
        if self._span > self._position_count:
            # Round up to a multiple of GRAIN.
            self._position_count = (self._span + GRAIN - 1) // GRAIN * GRAIN
        return self._positions, self._build_masks()

    def commit_recurrent_states(self) -> None:
        """Keep the recurrent states that the forward pass after `set_write_positions` computed."""
        if not self.supports_padding:
            self._states.store(self._slots, self._seen_ids, self._slot_count)

    def _build_masks(self) -> AttentionMasks:
        keys, queries = torch.arange(self._span, device=self._device), self._positions.unsqueeze(-1)
        # An id never attends to later ids, nor to ids that have left the window.
        later = keys > queries
        if self._window is None:
            return self._build_mask(later)
        hidden = later | (keys <= queries - self._window)
        # Without `layer_types`, every layer has the window.
        if not self._kinds:
            return self._build_mask(hidden)
        return (
            {FULL: self._build_mask(later), WINDOWED: self._build_mask(hidden)}
            if WINDOWED in self._kinds
            else self._build_mask(later)
        )

    def _build_mask(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, torch.finfo(self._dtype).min).unsqueeze(1)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write (B, H, Q, D) keys and values where `set_write_positions` selected.

        Return (B, H, K, D), all that these rows may attend to.
        """
        return self._write_states(key_states, layer_idx, 0), self._write_states(value_states, layer_idx, 1)

    def _write_states(self, states: Tensor, layer: int, kv_index: int) -> Tensor:
        store = self._get_tensor(states, layer, kv_index)
        # Advanced indices on both sides of a slice put their own dimensions first: (B, Q, H, D).
        store[self._slots.unsqueeze(1), :, self._positions] = states.transpose(1, 2)
        return store[self._slots, :, : self._span]

    def _get_tensor(self, states: Tensor, layer: int, kv_index: int) -> Tensor:
        """Return the tensor (slots, H, positions, D) for these states. Heads and widths differ per layer."""
        old = self._stores.get((layer, kv_index))
        shape = (self._slot_count, states.size(1), self._position_count, states.size(3))
        if old is not None and old.shape == shape:
            return old
        # Copy the old content into a larger tensor.
        store = states.new_zeros(shape, dtype=self._dtype)
        if old is not None:
            store[: old.size(0), :, : old.size(2)] = old
        self._stores[layer, kv_index] = store
        return store

    @property
    def layers(self) -> Sequence[LinearAttentionLayer]:
        """Convolution and recurrent states of the current rows, as models read and write them."""
        return self._states.layers

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return True if the current rows have earlier states in this layer. None means the last layer that has any."""
        flags = self.layers[self._states.last_layer if layer_idx is None else layer_idx].has_previous_state
        return all(flags.values()) if state_idx is None else bool(flags[state_idx])

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


@dataclass(slots=True)
class StatePosition:
    """Numbers of ids that the state of a slot, and the copy of an earlier state, have seen."""

    seen_ids: int = 0
    copied_ids: int = 0
    """Number of ids that the copy has seen. 0 means that there is no copy; a state that has seen no ids needs none."""
    copies: dict[StateKey, Tensor] = field(default_factory=dict)


class RecurrentStates:
    """Convolution and recurrent states of all slots, in tensors per layer.

    A forward pass starts with `load`, which selects its rows, and ends with `store`.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        layers = DynamicCache(config=config).layers
        self._counts = [
            layer.number_of_states if isinstance(layer, LinearAttentionCacheLayerMixin) else 0 for layer in layers
        ]
        self.layers: list[LinearAttentionLayer] = []
        """Cache layers of the current forward pass, one per layer of the model. Those without such states stay empty.
        """
        self._stores: dict[StateKey, Tensor] = {}
        self._positions: dict[int, StatePosition] = {}

    @property
    def has_states(self) -> bool:
        """True if any layer has such states."""
        return any(self._counts)

    @property
    def last_layer(self) -> int:
        """Number of the last layer that has such states."""
        return max(number for number, count in enumerate(self._counts) if count)

    def drop_slot(self, slot: int) -> None:
        """Delete the state of a slot, and its copy."""
        self._positions.pop(slot, None)

    def resume_slot(self, slot: int, computed: int, mark: int) -> int:
        """Prepare the slot of a session, and return the number of ids after which its state resumes.

        `computed` ids of the session are computed. The result is `computed` if the state or its copy has seen that many
        ids. Otherwise it is 0, and all ids must be fed again. While `computed` equals `mark`, to which the session may
        return, the state is copied.
        """
        position = self._positions.setdefault(slot, StatePosition())
        if position.seen_ids != computed and position.copied_ids == computed:
            # A call was taken back: return to the copy.
            for key, copy in position.copies.items():
                self._stores[key][slot] = copy
            position.seen_ids = computed
        if computed == 0 or position.seen_ids != computed:
            # Neither the state nor the copy fits, so the session starts again.
            self._positions[slot] = StatePosition()
            return 0
        if computed == mark != position.copied_ids:
            position.copied_ids = mark
            # A call starts here, and `undo` may come back.
            position.copies = {key: store[slot].clone() for key, store in self._stores.items()}
        return computed

    def load(self, slots: Tensor, starts: Sequence[int]) -> None:
        """Fill `layers` with the states of `slots`, which have seen `starts` ids. All of them have a state, or none."""
        self.layers = [LinearAttentionLayer(count) for count in self._counts]
        if not any(starts):
            return
        assert all(starts), "new and continued rows share a forward pass"
        for (number, attribute, state), store in self._stores.items():
            layer, rows = self.layers[number], store[slots]
            getattr(layer, attribute)[state] = rows
            if attribute == "conv_states":
                # Flags that transformers sets itself when it fills a layer.
                layer.conv_kernel_size[state] = rows.size(-1)
                layer.is_conv_states_initialized[state] = layer.has_previous_state[state] = True
            else:
                layer.is_recurrent_states_initialized[state] = True

    def store(self, slots: Tensor, seen: Sequence[int], slot_count: int) -> None:
        """Save the states of `slots` from `layers`, after `seen` ids. `slot_count` is the number of all slots."""
        for key, rows in self._iterate_stored():
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
                position.seen_ids = count

    def _iterate_stored(self) -> Iterator[tuple[StateKey, Tensor]]:
        for number, layer in enumerate(self.layers):
            for attribute in _STATE_ATTRIBUTES:
                for state, rows in getattr(layer, attribute).items():
                    if rows is not None:
                        yield (number, attribute, state), rows


def validate_cacheable(kind: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Reject a model whose past is more than keys, values, convolution and recurrent states per layer.

    Raises:
        ConfigError: the model keeps a state elsewhere, shares keys and values between layers, has an unknown kind of
            layer, or takes no positions.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    unsupported = sorted(kinds - {FULL, WINDOWED} - RUNNING - STATELESS)
    # MiniMax has layers of linear attention and its own cache, but is not stateful in transformers' sense.
    has_hidden_state = not kinds & RUNNING if kind._is_stateful else "linear_attention" in kinds
    if unsupported or has_hidden_state:
        names = ", ".join(unsupported) or "a running state outside of transformers' cache"
        raise ConfigError(f"model {kind.__name__} with layers", names, _REMEDY)
    shared_layers = getattr(text, "num_kv_shared_layers", 0)
    if shared_layers:
        raise ConfigError("num_kv_shared_layers", shared_layers, _REMEDY)
    # Rows differ in length, so the model must accept explicit positions.
    decoder = inspect.signature(kind.forward).parameters
    if takes_states_alone(kind):
        return
    if "position_ids" not in decoder or "past_key_values" not in decoder:
        raise ConfigError("model", kind.__name__, f"it takes no position ids; {_REMEDY}")


def keeps_running_state(kind: type[PreTrainedModel], config: PretrainedConfig) -> bool:
    """Return True if a model with this class and configuration stores more of earlier ids than keys and values."""
    layers = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return bool(kind._is_stateful or layers & RUNNING)


def takes_states_alone(kind: type[PreTrainedModel]) -> bool:
    """Return True if no layer attends. Such a model gets its states as `cache_params`, and no positions and no mask."""
    return "cache_params" in inspect.signature(kind.forward).parameters

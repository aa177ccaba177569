"""What a run takes of the GPU that trainer and sampler share: numbers in, a table out; no tensor, no device.

The largest step that the settings allow is planned for: every rollout as long as its limits let it be. Where a figure
comes from stands with it. One is assumed, because nobody publishes it: `VLLM_OWN`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

GIB = 1 << 30
CONTEXT = 5 * GIB // 8
"""What a process takes of a GPU before its first tensor: rounded up, `context_mib` of an H200 (docs/gpu.md)."""
VLLM_OWN = 3 * GIB // 2
"""Assumed: what vLLM's process takes beside weights, cache and activations (its context, captured graphs). It keeps
this while it sleeps: only what its allocator mapped is given back."""
SHARE = 0.92
"""Of the whole GPU that vLLM 0.32 takes where nobody gives it a cache, and that must be free when it starts in any case
(`gpu_memory_utilization`; `request_memory` in `vllm/v1/worker/utils.py`)."""
BATCHED = 2048
"""Tokens of one of vLLM's own steps (`SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS`)."""
TILE_ROWS, TILE_COLUMNS = 4096, 32768
"""Of a tile of logits: TRL's `TOKEN_CHUNK_SIZE`, and `scoring.TILE_GPU`."""
FLOAT = 4
"""Bytes of a float32."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model in numbers. All widths are those of one token."""

    weights: int
    """Numbers in all weights, tied ones once."""
    matrices: int
    """Those of them that are multiplied by: all but vectors and the input embedding."""
    adapted: int
    """Inputs and outputs of all linear layers that get adapters: numbers in adapters of rank 1."""
    edges: int
    """Rows and columns of all matrices, and all vectors: what Adafactor keeps."""
    layers: int
    hidden: int
    inner: int
    """Width between the two halves of a layer's MLP; of a mixture, of all experts that a token meets."""
    heads: int
    queries: int
    """Heads times their width."""
    keys: int
    """The same of the heads of keys, or of values."""
    vocab: int
    heads_normed: bool = False
    """Queries and keys are normalised a head (Qwen3)."""
    windows: tuple[int | None, ...] = ()
    """How far each layer looks back, tokens; None: to the start, 0: it keeps no keys. Empty: all to the start."""
    states: int = 0
    """Numbers of the convolution and recurrent states of a session, whatever its length."""

    def cache(self, tokens: int, itemsize: int) -> int:
        """Bytes of keys and values of a session of `tokens`: two vectors of `keys` a token and layer."""
        seen = self.windows or (None,) * self.layers
        return 2 * self.keys * itemsize * sum(tokens if window is None else min(tokens, window) for window in seen)


@dataclass(frozen=True, slots=True)
class Update:
    """The update in numbers."""

    rows: int
    """Rollouts whose activations are there at once: `TrainerConfig.share`."""
    longest: int
    """Tokens of the longest of them, prompt included."""
    itemsize: int = FLOAT
    """Bytes of a number that is computed with."""
    moments: float = 2 * FLOAT
    """The optimizer's bytes for each number that is trained; of Adafactor, for each of `Shape.edges`."""
    factored: bool = False
    """The optimizer is Adafactor."""
    lora_rank: int = 0
    reference: bool = False
    """There is a KL term."""
    checkpointing: bool = False
    copies: bool = False
    """Several processes train copies: DDP gathers gradients in buckets, which are as large as they are."""
    pass_tokens: int = 16384
    """Rows share a forward pass up to so many tokens: `fast.TOKENS_PER_PASS_GPU`."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """An engine on the trainer's GPU in numbers."""

    engine: Literal["vllm", "transformers"]
    sessions: int
    """Open at once."""
    context: int
    """Tokens of the longest session."""
    itemsize: int = 2
    """Bytes of a number of weights, keys and values."""
    cache: int | None = None
    """Bytes of vLLM's cache. None: what `SHARE` leaves."""
    sleep: bool = False
    beside: bool = False
    """It samples while the weights are updated."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Memory of a GPU, bytes."""

    total: int
    free: int
    """Before the run takes any."""


@dataclass(frozen=True, slots=True)
class Case:
    """A run on a GPU. `sampling` is None where nothing samples there."""

    shape: Shape
    update: Update
    sampling: Sampling | None
    gpu: Gpu


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that takes memory: bytes while it is sampled, while weights are updated, while they are handed over."""

    owner: str
    what: str
    sampled: int
    updated: int
    handed: int


PHASES = ("sampling", "updating", "handing weights over")


@dataclass(frozen=True, slots=True)
class Plan:
    """What the parts of a run take."""

    parts: tuple[Part, ...]
    gpu: Gpu

    @property
    def needed(self) -> tuple[int, int, int]:
        """Bytes in each of `PHASES`."""
        parts = self.parts
        return sum(p.sampled for p in parts), sum(p.updated for p in parts), sum(p.handed for p in parts)

    @property
    def peak(self) -> int:
        """The most of them."""
        return max(self.needed)

    @property
    def fits(self) -> bool:
        """Whether the GPU has so much."""
        return self.peak <= self.gpu.free


def planned(case: Case) -> Plan:
    """What `case` takes, part by part."""
    return Plan((*_trainer(case.shape, case.update), *_sampler(case)), case.gpu)


def trained(shape: Shape, update: Update) -> int:
    """Numbers that are trained: all weights, or two narrow matrices a linear layer (arXiv 2106.09685)."""
    return shape.adapted * update.lora_rank if update.lora_rank else shape.weights


def moments(shape: Shape, update: Update) -> int:
    """Bytes of the optimizer's state. Adam's two moments are float32, as the weights are (arXiv 1412.6980)."""
    if update.factored:
        numbers = shape.adapted * update.lora_rank if update.lora_rank else shape.edges
        return int(update.moments * numbers)
    return int(update.moments * trained(shape, update))


def layer_bytes(shape: Shape, update: Update) -> int:
    """Bytes that one layer keeps of one token for the gradient, as transformers computes a layer with RMSNorm, fused
    attention and a gated MLP; counted tensor by tensor, after Korthikanti et al. (arXiv 2205.05198, section 4.1).

    Norms keep what they are given, in float32, and, where their own weight is trained, what they made of it. Products
    keep their input: q, k and v share one, as gate and up do, but under autocast each has a copy of its own. Attention
    keeps queries, keys, values and its result; the MLP the gate before and after its bend, what it gates, the product.
    """
    frozen, low = update.lora_rank > 0, update.itemsize < FLOAT
    norms = FLOAT * (2 if frozen else 4) * shape.hidden
    scales = 2 + shape.heads
    if shape.heads_normed:
        norms += (FLOAT if frozen else FLOAT + update.itemsize) * (shape.queries + shape.keys)
        scales += shape.heads * (shape.queries + shape.keys) // shape.queries
    inputs = (5 if low else 2) * shape.hidden
    attention = (3 if low and frozen else 2) * shape.queries + 2 * shape.keys
    adapters = 7 * update.lora_rank  # what the first of two narrow matrices makes, on each of a layer's seven products
    return norms + FLOAT * scales + update.itemsize * (inputs + attention + 4 * shape.inner + adapters)


def activations(shape: Shape, update: Update) -> int:
    """Bytes kept for the gradient of one optimizer pass, and one layer's more on the way back.

    With checkpointing, the input of each layer alone is kept, and one layer of one pass is computed again at a time
    (arXiv 1604.06174).
    """
    tokens, at_once = update.rows * update.longest, _pass_rows(update) * update.longest
    layer = layer_bytes(shape, update)
    back = at_once * layer
    if update.checkpointing:
        return tokens * shape.layers * shape.hidden * _residual(update) + 2 * back
    return tokens * shape.layers * layer + back


def copies(shape: Shape, update: Update) -> int:
    """Bytes of the weights as a forward pass computes with them, where that is not how they are kept. Autocast makes
    them anew for each pass, and the gradient needs those of every pass (`torch.amp`: the cache lives as long as the
    context, `FastPass` enters one a pass)."""
    if update.itemsize == FLOAT:
        return 0
    passes = 1 if update.checkpointing else -(-update.rows // _pass_rows(update))
    return passes * update.itemsize * (trained(shape, update) if update.lora_rank else shape.matrices)


def logits(shape: Shape, update: Update) -> int:
    """Bytes of the output layer: the tokens' last states with their gradients, and two tiles of logits (TRL's
    `ChunkedLogProbFunction`: one of the product, one of its gradient). None is as long as the vocabulary."""
    tokens, at_once = update.rows * update.longest, _pass_rows(update) * update.longest
    tiles = 2 * min(at_once, TILE_ROWS) * min(shape.vocab, TILE_COLUMNS) * FLOAT
    return 2 * tokens * shape.hidden * FLOAT + tiles


def _pass_rows(update: Update) -> int:
    return min(update.rows, max(1, update.pass_tokens // update.longest))


def _residual(update: Update) -> int:
    """Bytes of a number between two layers: float32 where the embedding is."""
    return update.itemsize if update.lora_rank else FLOAT


def _trainer(shape: Shape, update: Update) -> Iterator[Part]:
    learned = trained(shape, update)
    kept = update.itemsize if update.lora_rank else FLOAT  # `TrainerConfig.loaded_dtype`
    weights = shape.weights * kept + (learned * FLOAT if update.lora_rank else 0)
    gradients = learned * FLOAT * (2 if update.copies else 1)
    merged = shape.matrices * kept if update.lora_rank else 0  # `lora.merged` makes them whole
    yield _held("trainer", "context", CONTEXT)
    yield _held("trainer", "weights", weights)
    if update.reference and not update.lora_rank:  # with adapters it is the model without them
        yield _held("trainer", "reference", shape.weights * kept)
    yield _held("trainer", "optimizer", moments(shape, update))
    yield Part("trainer", "gradients", 0, gradients, 0)
    yield Part("trainer", "weights as computed with", 0, copies(shape, update), merged)
    yield Part("trainer", "activations", 0, activations(shape, update), 0)
    yield Part("trainer", "logits", 0, logits(shape, update), 0)


def _sampler(case: Case) -> Sequence[Part]:
    shape, given = case.shape, case.sampling
    if given is None:
        return ()
    weights = shape.weights * given.itemsize
    step = given.itemsize * (2 * shape.hidden + shape.queries + 2 * shape.keys + 3 * shape.inner)
    chosen = 3 * given.sessions * shape.vocab * FLOAT  # logits, their logarithms, and what is drawn from
    if given.engine == "transformers":
        # `Decoder.load` has the file's weights and the new ones beside the old; `Arena` doubles its slots
        slots = 8 * 2 ** max(0, math.ceil(math.log2(given.sessions / 8)))
        keyed = sum(window != 0 for window in shape.windows) if shape.windows else shape.layers
        arena = slots * 2 * shape.keys * given.itemsize * keyed * (given.context + 63)
        # float32 at most; each session may have a copy, and a step has its rows' twice, gathered and updated
        states = FLOAT * shape.states * (slots + 3 * given.sessions)
        loading = shape.weights * (FLOAT + given.itemsize)
        one = given.sessions * step + chosen
        return (
            _held("transformers", "weights", weights),
            _held("transformers", "keys and values", arena),
            *([_held("transformers", "running states", states)] if states else []),
            Part("transformers", "one step", one, one if given.beside else 0, loading),
        )
    work = max(BATCHED, given.sessions) * step + chosen
    rest = weights + work + VLLM_OWN
    cache = max(int(SHARE * case.gpu.total) - rest, 0) if given.cache is None else given.cache
    asleep = 0 if given.sleep else 1
    return (
        _held("vllm", "context and graphs (assumed)", VLLM_OWN),
        Part("vllm", "weights", weights, asleep * weights, weights),
        Part("vllm", "keys and values", cache, asleep * cache, cache),
        Part("vllm", "activations and logits", work, asleep * work, work),
    )


def _held(owner: str, what: str, size: int) -> Part:
    return Part(owner, what, size, size, size)


def with_cache(case: Case) -> Case:
    """`case` with the largest cache of whole GiB that fits; as it is where it fits, or none of a context would."""
    given = case.sampling
    if given is None or given.engine != "vllm" or planned(case).fits:
        return case
    bare = planned(replace(case, sampling=replace(given, cache=0)))
    awake = max(bare.needed if not given.sleep else (bare.needed[0], bare.needed[2]))
    most = (case.gpu.free - awake) // GIB
    least = max(1, -(-case.shape.cache(given.context, given.itemsize) // GIB))
    return replace(case, sampling=replace(given, cache=most * GIB)) if most >= least else case

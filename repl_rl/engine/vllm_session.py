"""Engine sessions on vLLM: a streaming-input request that stays open between lines, or one request per line.

Both give the same ids under greedy decoding. Facts about vLLM 0.32 that shape this file:

- The scheduler forgets the last sampled id of a chunk, so the next chunk starts with it.
- A chunk that asks for 0 ids kills the engine's process, so `limits.room` rejects it.
- A chunk's finish reason can be that of the previous chunk, so the end of a chunk is derived from its ids.
- A session keeps its blocks while it waits for input, and vLLM cannot take them. Others that lack blocks wait forever.
- A running session can be preempted. If that hits the last step of a chunk, asynchronous scheduling forgets all of its
  ids.

`Place.take` before every slice of a chunk prevents both.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensInput, tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from repl_rl.engine.base import Chunk, ChunkEnd, Sampling, Watch
from repl_rl.engine.kinds import Drive
from repl_rl.engine.limits import Gate, ending, room
from repl_rl.engine.seating import Place, undivided
from repl_rl.engine.vllm_silence import Waiting
from repl_rl.errors import EngineDied, EngineError

WHOLE_CHUNKS = 1 << 20
"""Stream interval longer than any chunk. vLLM then wakes the caller only for the first and the last id of a chunk."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Parameters of one chunk; also the key of the cache in `Parameters`."""

    most: int
    stop_ids: frozenset[int]
    temperature: float
    interval: int


class Parameters:
    """Cache of vLLM's parameter objects, one per kind of chunk."""

    def __init__(self) -> None:
        self._made: dict[Ask, SamplingParams] = {}

    def of(self, ask: Ask) -> SamplingParams:
        """Return the parameters of one chunk."""
        made = self._made.get(ask)
        if made is None:
            # Limit the cache, since chunks may differ in length at every call.
            if len(self._made) >= 1024:
                self._made.clear()
            made = self._made[ask] = SamplingParams(
                max_tokens=ask.most,
                stop_token_ids=sorted(ask.stop_ids),
                temperature=ask.temperature,
                stream_interval=ask.interval,
                # Only that of the sampled id.
                logprobs=0,
                flat_logprobs=True,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                skip_clone=True,
            )
        return made


@dataclass(slots=True)
class Draft:
    """Chunk in progress."""

    most: int
    stop_ids: frozenset[int]
    watch: Watch | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: ChunkEnd | None = None
    slice_end: int = 0
    """Largest number of ids that the chunk has when vLLM's current request is done."""

    def add(self, output: RequestOutput) -> None:
        """Append ids that vLLM sampled, up to the id that ends the chunk; later ids are dropped.

        Raises:
            EngineError: vLLM stopped before the end of the chunk, or gave no log probability.
        """
        part = output.outputs[0]
        logprobs = part.logprobs
        if not isinstance(logprobs, FlatLogprobs) or len(logprobs.logprobs) != len(part.token_ids):
            raise EngineError("vLLM returned ids without one log probability each; its version does not fit repl_rl")
        for token_id, logprob in zip(part.token_ids, logprobs.logprobs, strict=True):
            self.token_ids.append(token_id)
            # Rounding can give values of up to 1e-7 above 0.
            self.logprobs.append(min(logprob, 0.0))
            self.end = ending(token_id, len(self.token_ids), self.most, self.stop_ids, self.watch)
            if self.end is not None:
                return
        # A finish reason alone does not count, since it can be that of the previous chunk.
        if part.finish_reason is not None and len(self.token_ids) < self.slice_end:
            raise EngineError(
                f"vLLM ended a chunk after {len(self.token_ids)} of {self.most} ids ({part.finish_reason}); "
                "the session was aborted or does not fit its cache"
            )

    def chunk(self, policy_step: int) -> Chunk:
        """Return the finished chunk."""
        assert self.end is not None
        return Chunk(tuple(self.token_ids), tuple(self.logprobs), self.end, policy_step)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Loaded weights, and the salt of keys and values that may be used with them."""

    policy_step: int
    """Number of optimizer steps behind the weights."""
    salt: str | None
    """Salt of the prefix cache; requests with different salts share nothing. None means that a load empties it."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Objects that all sessions of one engine share."""

    context_tokens: int
    drive: Drive
    parameters: Parameters
    gate: Gate
    loaded: Callable[[], Loaded]
    """Function that returns the current weights; they do not change while a call is inside the gate."""
    waiting: Waiting = field(default_factory=Waiting)
    """Counter of the calls that wait for vLLM's process."""
    slice_ids: int = 256
    """Ids that a session samples before it asks for more blocks (>= 1). It reserves blocks for that many and may not
    need all of them."""


async def _feed(inputs: asyncio.Queue[StreamingInput]) -> AsyncGenerator[StreamingInput, None]:
    while True:
        yield await inputs.get()


class VllmSession:
    """Engine session of one rollout on vLLM."""

    def __init__(
        self, llm: AsyncLLM, name: str, ids: list[int], sampling: Sampling, shared: Shared, place: Place
    ) -> None:
        self.ids = ids
        self._llm = llm
        self._name = name
        self._sampling = sampling
        self._shared = shared
        self._requests = 0
        self._outputs: AsyncGenerator[RequestOutput, None] | None = None
        self._inputs: asyncio.Queue[StreamingInput] = asyncio.Queue()
        self._closed = False
        self._since: Loaded | None = None
        """Weights of its oldest keys and values."""
        self._before = len(ids)
        self._draft: Draft | None = None
        self._place = place
        self._hanging_up = asyncio.Lock()
        place.hang_up = self.hang_up

    async def sample(
        self, observed: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None = None
    ) -> Chunk:
        """See `EngineSession.sample`."""
        async with self._shared.gate.call():
            return await self._sample(observed, max_tokens, stop_ids, watch)

    async def _sample(
        self, observed: Sequence[int], max_tokens: int, stop_ids: frozenset[int], watch: Watch | None
    ) -> Chunk:
        if self._closed:
            raise EngineError("the session is closed, or its last call failed; open a new one")
        # With a salt, keys and values survive a load, so the first weights stay the oldest.
        if self._since is None or self._since.salt is None:
            self._since = self._shared.loaded()
        most = room(len(self.ids), observed, max_tokens, self._shared.context_tokens)
        streamed = self._shared.drive is Drive.SESSION
        draft = self._draft = Draft(most, stop_ids, watch)
        self._before = len(self.ids)
        # vLLM forgets the last id of a chunk, so send that id again.
        last = self.ids[-1:]
        self.ids.extend(observed)
        try:
            await (self._stream([*last, *observed], draft) if streamed else self._request(draft))
        except EngineDeadError as error:
            raise EngineDied("the vLLM process is gone") from error
        except ValueError as error:
            raise EngineError(f"vLLM refused the request: {error}") from error
        finally:
            self.ids.extend(draft.token_ids)
            # Without an end, the call failed or was cancelled.
            if draft.end is None:
                await self.close()
            elif streamed:
                await self._pause(draft)
        return draft.chunk(self._since.policy_step)

    async def undo(self, call: asyncio.Task[Chunk]) -> int:
        """See `EngineSession.undo`. The prefix cache keeps earlier ids, in whole blocks."""
        wasted = 0 if self._draft is None else len(self._draft.token_ids)
        if not call.done():
            wasted += self._held_back()
            call.cancel()
            await asyncio.wait({call})
        # vLLM cannot remove ids from a request, so the next call opens a new one.
        await self.hang_up()
        del self.ids[self._before :]
        self._closed = False
        return wasted

    def _held_back(self) -> int:
        """Return the number of ids that vLLM has sampled but not delivered, because it delivers whole chunks only."""
        processor = self._llm.output_processor
        names = processor.external_req_ids.get(f"{self._name}.{self._requests}", ())
        states = [processor.request_states[name] for name in names if name in processor.request_states]
        return sum(s.detokenizer.num_output_tokens() - s.sent_tokens_offset for s in states if s.detokenizer)

    async def close(self) -> None:
        """Free the request in the engine. A second call does nothing."""
        self._closed = True
        await self.hang_up()

    async def _stream(self, appended: list[int], draft: Draft) -> None:
        """Sample in the streaming request, slice by slice, as far as there are blocks."""
        while True:
            size = min(self._shared.slice_ids, draft.most - len(draft.token_ids))
            draft.slice_end = len(draft.token_ids) + size
            # One id more than the slice, since vLLM may already compute the id after its end.
            await self._place.take(min(len(self.ids) + draft.slice_end + 1, self._shared.context_tokens))
            await self._continue(appended, self._ask(size, draft), draft)
            if draft.end is not None:
                return
            # As between chunks, the next slice starts with the last id of this one.
            appended = draft.token_ids[-1:]
            self._place.settle(len(self.ids) + len(draft.token_ids))

    async def _pause(self, draft: Draft) -> None:
        """Keep the computed keys and values, unless a watch ended the chunk early.

        vLLM continues to sample after the watched id, and it cannot remove ids from a session.
        """
        self._place.settle(len(self.ids))
        if draft.end is ChunkEnd.WATCH and len(draft.token_ids) < draft.slice_end:
            await self.hang_up()

    async def _continue(self, appended: list[int], ask: Ask, draft: Draft) -> None:
        """Sample in the streaming request to the end of the slice. If there is no request, open one with all ids."""
        parameters = self._shared.parameters.of(ask)
        if self._outputs is None:
            appended = [*self.ids, *draft.token_ids]
            self._inputs = asyncio.Queue()
            self._outputs = self._llm.generate(_feed(self._inputs), parameters, self._next_name())
        self._inputs.put_nowait(StreamingInput(self._prompt(appended), parameters))
        await self._collect(self._outputs, draft)

    async def _request(self, draft: Draft) -> None:
        """Sample with a separate request, which keeps no blocks. vLLM may preempt it, which costs time only.

        A watch that stops early aborts the request, so that no further ids are sampled.
        """
        await self.hang_up()
        draft.slice_end = draft.most
        parameters = self._shared.parameters.of(self._ask(draft.most, draft))
        self._outputs = self._llm.generate(self._prompt(self.ids.copy()), parameters, self._next_name())
        try:
            await self._collect(self._outputs, draft)
        finally:
            await self.hang_up()

    def _prompt(self, ids: list[int]) -> TokensInput:
        return tokens_input(ids, cache_salt=self._since.salt if self._since else None)

    def _ask(self, most: int, draft: Draft) -> Ask:
        # A watch must see each id before the next ones are sampled.
        interval = WHOLE_CHUNKS if draft.watch is None else 1
        return Ask(most, draft.stop_ids, self._sampling.temperature, interval)

    async def _collect(self, outputs: AsyncGenerator[RequestOutput, None], draft: Draft) -> None:
        """Collect ids until the chunk or its slice is complete."""
        with self._shared.waiting.one():
            async for output in outputs:
                draft.add(output)
                if draft.end is not None or len(draft.token_ids) >= draft.slice_end:
                    return
        raise EngineError("vLLM closed the stream of a session that still wanted ids")

    async def hang_up(self) -> None:
        """Give up keys and values in the engine. The next call computes them again from all ids."""
        await undivided(self._hang_up())

    async def _hang_up(self) -> None:
        # A second caller waits until the blocks are free.
        async with self._hanging_up:
            outputs, self._outputs = self._outputs, None
            if outputs is not None:
                await outputs.aclose()
            self._place.dropped()

    def _next_name(self) -> str:
        self._requests += 1
        return f"{self._name}.{self._requests}"

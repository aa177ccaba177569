"""One rollout on vLLM: a streaming-input request kept open between lines, or a request a line.

Both give the same ids under greedy decoding. Facts about vLLM 0.32 that shape this file:

- The scheduler forgets the last sampled id of a chunk, so the next chunk starts with it.
- A chunk that asks for 0 ids kills the engine's process: `limits.room` refuses it.
- A chunk's finish reason can be the one of the chunk before: where a chunk ends is read off its ids.
- A session keeps its blocks while it waits for input, and nobody can take them from it: others that are short of blocks
  wait for ever. One that runs can be preempted, but if that hits a step that was its chunk's last, with asynchronous
  scheduling, all of its ids are forgotten. So it never comes to either: `Place.take` before every slice of a chunk.
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
"""A stream interval longer than any chunk: vLLM then wakes us for a chunk's first id and its last one only."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What one chunk wants; also the key under which its parameters are kept."""

    most: int
    stop_ids: frozenset[int]
    temperature: float
    interval: int


class Parameters:
    """vLLM's parameter objects, made once for each kind of chunk."""

    def __init__(self) -> None:
        self._made: dict[Ask, SamplingParams] = {}

    def of(self, ask: Ask) -> SamplingParams:
        """The parameters of one chunk."""
        made = self._made.get(ask)
        if made is None:
            if len(self._made) >= 1024:
                self._made.clear()
            made = self._made[ask] = SamplingParams(
                max_tokens=ask.most,
                stop_token_ids=sorted(ask.stop_ids),
                temperature=ask.temperature,
                stream_interval=ask.interval,
                logprobs=0,  # of the sampled id, no others
                flat_logprobs=True,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                skip_clone=True,
            )
        return made


@dataclass(slots=True)
class Draft:
    """A chunk in the making."""

    most: int
    stop_ids: frozenset[int]
    watch: Watch | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: ChunkEnd | None = None
    slice_end: int = 0
    """How many ids it has, at most, when what vLLM was asked for is done."""

    def add(self, output: RequestOutput) -> None:
        """Take what vLLM sampled, up to the id that ends the chunk; ids past it are dropped.

        Raises:
            EngineError: vLLM gave up before the end of the chunk, or gave no log probability.
        """
        part = output.outputs[0]
        logprobs = part.logprobs
        if not isinstance(logprobs, FlatLogprobs) or len(logprobs.logprobs) != len(part.token_ids):
            raise EngineError("vLLM returned ids without one log probability each; its version does not fit repl_rl")
        for token_id, logprob in zip(part.token_ids, logprobs.logprobs, strict=True):
            self.token_ids.append(token_id)
            self.logprobs.append(min(logprob, 0.0))  # rounding can leave 1e-7 above the boundary
            self.end = ending(token_id, len(self.token_ids), self.most, self.stop_ids, self.watch)
            if self.end is not None:
                return
        if part.finish_reason is not None and len(self.token_ids) < self.slice_end:
            raise EngineError(
                f"vLLM ended a chunk after {len(self.token_ids)} of {self.most} ids ({part.finish_reason}); "
                "the session was aborted or does not fit its cache"
            )

    def chunk(self, policy_step: int) -> Chunk:
        """The finished chunk."""
        assert self.end is not None
        return Chunk(tuple(self.token_ids), tuple(self.logprobs), self.end, policy_step)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Weights that were loaded, and whose keys and values may be used with them."""

    policy_step: int
    """Optimizer steps behind them."""
    salt: str | None
    """Of the prefix cache: whoever samples with another shares nothing. None: a load empties the cache."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What all sessions of one engine have in common."""

    context_tokens: int
    drive: Drive
    parameters: Parameters
    gate: Gate
    loaded: Callable[[], Loaded]
    """The weights of now; they stay while a call is inside the gate."""
    waiting: Waiting = field(default_factory=Waiting)
    """Counts what vLLM's process is waited for."""
    slice_ids: int = 256
    """Ids that a session samples before it asks for more blocks (>= 1): what it reserves and may not need."""


async def _feed(inputs: asyncio.Queue[StreamingInput]) -> AsyncGenerator[StreamingInput, None]:
    while True:
        yield await inputs.get()


class VllmSession:
    """One rollout's conversation with vLLM."""

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
        """The weights of its oldest keys and values."""
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
        if self._since is None or self._since.salt is None:
            self._since = self._shared.loaded()
        most = room(len(self.ids), observed, max_tokens, self._shared.context_tokens)
        streamed = self._shared.drive is Drive.SESSION
        draft = self._draft = Draft(most, stop_ids, watch)
        self._before = len(self.ids)
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
            if draft.end is None:
                await self.close()
            elif streamed:
                await self._pause(draft)
        return draft.chunk(self._since.policy_step)

    async def undo(self, call: asyncio.Task[Chunk]) -> int:
        """See `EngineSession.undo`. The prefix cache keeps what was computed before, in whole blocks."""
        wasted = 0 if self._draft is None else len(self._draft.token_ids)
        if not call.done():
            wasted += self._held_back()
            call.cancel()
            await asyncio.wait({call})
        await self.hang_up()
        del self.ids[self._before :]
        self._closed = False
        return wasted

    def _held_back(self) -> int:
        """Ids that vLLM has sampled and not handed over, because nobody is woken in the middle of a chunk."""
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
            await self._place.take(min(len(self.ids) + draft.slice_end + 1, self._shared.context_tokens))
            await self._continue(appended, self._ask(size, draft), draft)
            if draft.end is not None:
                return
            appended = draft.token_ids[-1:]
            self._place.settle(len(self.ids) + len(draft.token_ids))

    async def _pause(self, draft: Draft) -> None:
        """Keep what was computed, unless a watch ended the chunk: vLLM goes on, and takes no id of a session back."""
        self._place.settle(len(self.ids))
        if draft.end is ChunkEnd.WATCH and len(draft.token_ids) < draft.slice_end:
            await self.hang_up()

    async def _continue(self, appended: list[int], ask: Ask, draft: Draft) -> None:
        """Go on in the streaming request, opening it with all ids if there is none, to the end of the slice."""
        parameters = self._shared.parameters.of(ask)
        if self._outputs is None:
            appended = [*self.ids, *draft.token_ids]
            self._inputs = asyncio.Queue()
            self._outputs = self._llm.generate(_feed(self._inputs), parameters, self._next_name())
        self._inputs.put_nowait(StreamingInput(self._prompt(appended), parameters))
        await self._collect(self._outputs, draft)

    async def _request(self, draft: Draft) -> None:
        """Sample with a request of its own, which keeps no blocks: vLLM may preempt it, and it loses nothing but time.

        A watch that stops early aborts it, so nothing is sampled for nobody.
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
        interval = WHOLE_CHUNKS if draft.watch is None else 1
        return Ask(most, draft.stop_ids, self._sampling.temperature, interval)

    async def _collect(self, outputs: AsyncGenerator[RequestOutput, None], draft: Draft) -> None:
        """Take ids until the chunk is over, or its slice."""
        with self._shared.waiting.one():
            async for output in outputs:
                draft.add(output)
                if draft.end is not None or len(draft.token_ids) >= draft.slice_end:
                    return
        raise EngineError("vLLM closed the stream of a session that still wanted ids")

    async def hang_up(self) -> None:
        """Give up keys and values in the engine; the next call computes them again from all ids."""
        await undivided(self._hang_up())

    async def _hang_up(self) -> None:
        async with self._hanging_up:  # who comes second waits until they are really gone
            outputs, self._outputs = self._outputs, None
            if outputs is not None:
                await outputs.aclose()
            self._place.dropped()

    def _next_name(self) -> str:
        self._requests += 1
        return f"{self._name}.{self._requests}"

"""The server's addresses: who may ask, how much, and what answers."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from repl_rl.cli.serve.asking import A, Asked, ChatAsked, TextAsked, read
from repl_rl.cli.serve.desk import Desk, Done, Tell
from repl_rl.cli.serve.keys import Keys
from repl_rl.cli.serve.page import PAGES, page
from repl_rl.cli.serve.refusal import PATIENCE_S, Refusal
from repl_rl.cli.serve.responses import TurnResponse
from repl_rl.cli.serve.shapes import Shape

MOST_BYTES = 1 << 20
"""Of a request's body."""
_OPEN = ("/health", *PAGES)
"""Addresses that need no key."""


class App:
    """One policy's server."""

    def __init__(
        self, desk: Desk, keys: Keys, model: str, hosts: Collection[str] | None, patience_s: float = PATIENCE_S
    ) -> None:
        """`hosts`: names under which it may be asked; None: any. A page of another site, open in a browser on this
        machine, could have any name resolve to this server."""
        self._patience_s = patience_s
        self._desk = desk
        self._keys = keys
        self._model = model
        self._hosts = hosts
        self.asgi = app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        for method, path, answer in (
            ("POST", "/v1/chat/completions", self._chat),
            ("POST", "/v1/completions", self._complete),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{name:path}", self._one_model),
            ("DELETE", "/v1/conversations/{id}", self._end),
            ("GET", "/health", self._health),
            ("GET", "/metrics", self._metrics),
            *(("GET", path, self._page) for path in PAGES),
        ):
            app.add_api_route(path, self._guarded(path, answer), methods=[method], response_model=None)
        app.add_exception_handler(HTTPException, self._lost)
        app.add_exception_handler(Refusal, self._late)

    def _guarded(
        self, path: str, answer: Callable[[Request, str], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """`answer`, given who asks, where that may; a refusal is answered as one, and all is counted."""

        async def guarded(request: Request) -> Response:
            try:
                response = await answer(request, self._owner(request, path))
            except Refusal as refusal:
                response = _refused(refusal)
            except ClientDisconnect:
                response = Response(status_code=499)  # nobody reads it
            if not isinstance(response, TurnResponse):
                self._count(path, response.status_code)
            return response

        return guarded

    def _owner(self, request: Request, path: str) -> str:
        """Who asks.

        Raises:
            Refusal: nobody who may.
        """
        if self._hosts is not None:
            host, origin = _host(f"//{request.headers.get('host', '')}"), request.headers.get("origin")
            if host not in self._hosts or (origin is not None and _host(origin) not in self._hosts):
                remedy = "ask it as 127.0.0.1 or localhost, or let it listen for others with --host and --keys"
                raise Refusal(403, f"this server answers its own machine alone, under a name of its own; {remedy}")
        owner = "" if path in _OPEN else self._keys.owner(request.headers.get("authorization"))
        if owner is None:
            raise Refusal(401, "no API key, or a wrong one; send `Authorization: Bearer KEY`", code="invalid_api_key")
        return owner

    async def _chat(self, request: Request, owner: str) -> Response:
        return await self._turn(request, owner, ChatAsked)

    async def _complete(self, request: Request, owner: str) -> Response:
        return await self._turn(request, owner, TextAsked)

    async def _turn(self, request: Request, owner: str, kind: type[A]) -> Response:
        asked: Asked = read(kind, await _body(request, self._patience_s))
        self._refuse_other(asked.model)
        path = request.url.path

        async def play(tell: Tell) -> Done:
            try:
                done = await self._desk.play(asked, owner, tell)
            except Refusal as refusal:
                self._count(path, refusal.status)
                raise
            self._count(path, 200)
            return done

        return TurnResponse(play, Shape(asked, self._model), stream=bool(asked.stream), patience_s=self._patience_s)

    async def _models(self, request: Request, owner: str) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _one_model(self, request: Request, owner: str) -> Response:
        self._refuse_other(request.path_params["name"])
        return JSONResponse(self._described())

    async def _end(self, request: Request, owner: str) -> Response:
        self._desk.conversations.end(request.path_params["id"], owner)
        return Response(status_code=204)

    async def _health(self, request: Request, owner: str) -> Response:
        status = "stopping" if self._desk.stopping else "broken" if self._desk.broken is not None else "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def _metrics(self, request: Request, owner: str) -> Response:
        return PlainTextResponse(self._desk.figures.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _page(self, request: Request, owner: str) -> Response:
        return page(request.url.path)

    async def _late(self, request: Request, error: Exception) -> Response:
        """A turn that is refused when its turn has come; it is counted already."""
        assert isinstance(error, Refusal)
        return _refused(error)

    async def _lost(self, request: Request, error: Exception) -> Response:
        """What FastAPI itself refuses: an address or a method that is not there."""
        assert isinstance(error, HTTPException)
        allowed = (error.headers or {}).get("Allow")
        remedy = f"use {allowed}" if allowed else "addresses are as in OpenAI's API: POST /v1/chat/completions, ..."
        message = f"{request.method} {request.url.path:.80} is not there; {remedy}"
        return _refused(Refusal(error.status_code, message, allow=allowed))

    def _described(self) -> dict[str, object]:
        return {"id": self._model, "object": "model", "created": 0, "owned_by": "repl_rl"}

    def _refuse_other(self, model: str) -> None:
        if model != self._model:
            message = f"model is {model!r:.80}; this server has {self._model!r}"
            raise Refusal(404, message, param="model", code="model_not_found")

    def _count(self, path: str, status: int) -> None:
        self._desk.figures.requests.labels(path, str(status)).inc()


def _host(address: str) -> str:
    """The name in an address; "": there is none."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def _refused(refusal: Refusal) -> Response:
    """In ASCII: a request that is named in it may hold half of a surrogate pair."""
    headers = dict(refusal.headers)
    return Response(json.dumps(refusal.body), refusal.status, headers, media_type="application/json")


async def _body(request: Request, patience_s: float) -> bytes:
    """The body of a request.

    Raises:
        Refusal: it is no JSON by its own account (415), too long (413), or too slow (408).
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal(415, "send the body as application/json")
    too_long = Refusal(413, f"the body has more than {MOST_BYTES} bytes", code="body_too_large")
    said = request.headers.get("content-length", "0")
    if said.isascii() and said.isdigit() and int(said) > MOST_BYTES:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(patience_s):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    raise too_long
    except TimeoutError as error:
        raise Refusal(408, f"the body did not come within {patience_s:g} s") from error
    return bytes(body)

"""Endpoints of the server: routes, access control, size limits and error responses.

The web page at `/` consists of three files, which send requests to their own server only.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from repl_rl.serve.auth import ApiKeys
from repl_rl.serve.conversation_service import OnTurnUpdate, TurnResult, TurnService
from repl_rl.serve.http_errors import PATIENCE_S, RequestError
from repl_rl.serve.openai_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    RequestT,
    parse_request,
)
from repl_rl.serve.openai_responses import ResponseBuilder, TurnResponse

MAX_BODY_BYTES = 1 << 20
"""Largest body of a request, bytes."""
PAGES: Mapping[str, tuple[str, str]] = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
"""Path -> file name and media type. The files hold nothing that needs an API key."""
_OPEN_PATHS = ("/health", *PAGES)
"""Paths that need no API key."""
# The page shows text of a language model, which is untrusted. The headers forbid inline scripts and other origins.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class ServerApp:
    """ASGI application that serves one policy."""

    def __init__(
        self,
        service: TurnService,
        keys: ApiKeys,
        model: str,
        hosts: Collection[str] | None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Set up the routes.

        Args:
            service: the service that plays turns.
            keys: the API keys with access.
            model: the model name for clients.
            hosts: allowed host names of requests; None allows any. This prevents DNS rebinding: a page of another site,
                open in a browser on this machine, could resolve its own name to this server.
            patience_s: see `PATIENCE_S`.
        """
        self._patience_s = patience_s
        self._service = service
        self._keys = keys
        self._model = model
        self._hosts = hosts
        # Every route goes through `_wrap_handler`, so that none lacks access control.
        self.asgi = app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        for method, path, handler in (
            ("POST", "/v1/chat/completions", self._handle_chat_completion),
            ("POST", "/v1/completions", self._handle_completion),
            ("GET", "/v1/models", self._list_models),
            ("GET", "/v1/models/{name:path}", self._describe_model),
            ("DELETE", "/v1/conversations/{id}", self._end_conversation),
            ("GET", "/health", self._report_health),
            ("GET", "/metrics", self._report_metrics),
            *(("GET", path, self._serve_page) for path in PAGES),
        ):
            app.add_api_route(path, self._wrap_handler(path, handler), methods=[method], response_model=None)
        app.add_exception_handler(HTTPException, self._handle_not_found)
        app.add_exception_handler(RequestError, self._handle_late_error)

    def _wrap_handler(
        self, path: str, handler: Callable[[Request, str], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint `handler` with access control, error responses and metrics."""

        async def handle(request: Request) -> Response:
            try:
                response = await handler(request, self._authenticate(request, path))
            except RequestError as error:
                response = _build_error_response(error)
            except ClientDisconnect:
                # The status is only for the metrics, because the client has left.
                response = Response(status_code=499)
            # A turn is counted when it has been played, in `_run_turn`.
            if not isinstance(response, TurnResponse):
                self._count_response(path, response.status_code)
            return response

        return handle

    def _authenticate(self, request: Request, path: str) -> str:
        """Return the name of the client, which its API key determines.

        Raises:
            RequestError: the host name is not allowed (403), or the key is missing or wrong (401).
        """
        if self._hosts is not None:
            # A browser also names the page that sends the request. That page must be ours too.
            host, origin = _parse_host(f"//{request.headers.get('host', '')}"), request.headers.get("origin")
            if host not in self._hosts or (origin is not None and _parse_host(origin) not in self._hosts):
                remedy = "use 127.0.0.1 or localhost as its address, or start it with --host and --keys"
                raise RequestError(403, f"this server only answers requests from its own machine; {remedy}")
        owner = "" if path in _OPEN_PATHS else self._keys.find_owner(request.headers.get("authorization"))
        if owner is None:
            raise RequestError(
                401, "no API key, or a wrong one; send `Authorization: Bearer KEY`", code="invalid_api_key"
            )
        return owner

    async def _handle_chat_completion(self, request: Request, owner: str) -> Response:
        return await self._run_turn(request, owner, ChatCompletionRequest)

    async def _handle_completion(self, request: Request, owner: str) -> Response:
        return await self._run_turn(request, owner, CompletionRequest)

    async def _run_turn(self, request: Request, owner: str, request_type: type[RequestT]) -> Response:
        """Return a streaming response. Its body runs the requested turn while the client reads it."""
        parsed: GenerationRequest = parse_request(request_type, await _read_body(request, self._patience_s))
        self._validate_model(parsed.model)
        path = request.url.path

        async def play_turn(publish: OnTurnUpdate) -> TurnResult:
            try:
                result = await self._service.run_turn(parsed, owner, publish)
            except RequestError as error:
                self._count_response(path, error.status)
                raise
            self._count_response(path, 200)
            return result

        return TurnResponse(
            play_turn, ResponseBuilder(parsed, self._model), stream=bool(parsed.stream), patience_s=self._patience_s
        )

    async def _list_models(self, request: Request, owner: str) -> Response:
        return JSONResponse({"object": "list", "data": [self._build_model_description()]})

    async def _describe_model(self, request: Request, owner: str) -> Response:
        self._validate_model(request.path_params["name"])
        return JSONResponse(self._build_model_description())

    async def _end_conversation(self, request: Request, owner: str) -> Response:
        self._service.conversations.end(request.path_params["id"], owner)
        return Response(status_code=204)

    async def _report_health(self, request: Request, owner: str) -> Response:
        status = "stopping" if self._service.is_stopping else "broken" if self._service.failure is not None else "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def _report_metrics(self, request: Request, owner: str) -> Response:
        return PlainTextResponse(self._service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _serve_page(self, request: Request, owner: str) -> Response:
        return build_page_response(request.url.path)

    async def _handle_late_error(self, request: Request, error: Exception) -> Response:
        """Answer a refusal that a `TurnResponse` raises while it runs. It is counted already."""
        assert isinstance(error, RequestError)
        return _build_error_response(error)

    async def _handle_not_found(self, request: Request, error: Exception) -> Response:
        """Answer an error of FastAPI itself, such as an unknown path or method."""
        assert isinstance(error, HTTPException)
        allowed = (error.headers or {}).get("Allow")
        remedy = f"use {allowed}" if allowed else "addresses are as in OpenAI's API: POST /v1/chat/completions, ..."
        message = f"{request.method} {request.url.path:.80} does not exist; {remedy}"
        return _build_error_response(RequestError(error.status_code, message, allow=allowed))

    def _build_model_description(self) -> dict[str, object]:
        return {"id": self._model, "object": "model", "created": 0, "owned_by": "repl_rl"}

    def _validate_model(self, model: str) -> None:
        """Refuse another model name (404)."""
        if model != self._model:
            message = f"model is {model!r:.80}; this server has {self._model!r}"
            raise RequestError(404, message, param="model", code="model_not_found")

    def _count_response(self, path: str, status: int) -> None:
        self._service.metrics.requests.labels(path, str(status)).inc()


def _parse_host(address: str) -> str:
    """Return the host name in an address, or "" if it has none."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def _build_error_response(error: RequestError) -> Response:
    """Return the error response. Its JSON is ASCII, because quoted text of a request may hold a lone surrogate."""
    headers = dict(error.headers)
    return Response(json.dumps(error.body), error.status, headers, media_type="application/json")


async def _read_body(request: Request, patience_s: float) -> bytes:
    """Read the body of a request.

    Raises:
        RequestError: its content type is not JSON (415), it is too long (413), or too slow (408).
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError(415, "send the body as application/json")
    too_long = RequestError(413, f"the body has more than {MAX_BODY_BYTES} bytes", code="body_too_large")
    # The announced length allows an early refusal. It may be missing or wrong, so the loop below counts the bytes too.
    content_length = request.headers.get("content-length", "0")
    if content_length.isascii() and content_length.isdigit() and int(content_length) > MAX_BODY_BYTES:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(patience_s):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise too_long
    except TimeoutError as error:
        raise RequestError(408, f"the body did not arrive within {patience_s:g} s") from error
    return bytes(body)


def build_page_response(path: str) -> Response:
    """Return the response with the file of a path in `PAGES`."""
    name, media_type = PAGES[path]
    return Response(_read_page_file(name), media_type=media_type, headers=_PAGE_HEADERS)


@cache
def _read_page_file(name: str) -> str:
    """Read a file of the page, once per process."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")

"""The HTTP face: vLLM's endpoints over the driver."""

from __future__ import annotations

import sys
import time
import traceback
import uuid
from collections.abc import Callable

import msgspec

from . import bodies
from .bodies import ApiError, ChatBody, CompletionBody, GenerationBody, RoutingError
from .clock import FASTEST, SLOWEST
from .driver import Driver
from .faults import Fault, FaultyStream, FaultyWhole
from .options import Options
from .protocol import Exchange
from .request import Request, State
from .sse import Reply, Sink, StreamReply, WholeReply
from .text import Prompt, count_tokens, render_chat
from .vocabulary import Vocabulary

_PREFIX = {True: "chatcmpl-", False: "cmpl-"}


class App:
    """Routes requests; everything that generates goes through the driver."""

    def __init__(self, options: Options, driver: Driver) -> None:
        self.options = options
        self.driver = driver
        self.faults = options.faults
        self.vocabulary = Vocabulary()
        self._started = int(time.time())
        config = options.engine
        self._unit = config.match_unit if config.caching else 0
        get, post = "GET", "POST"
        self._routes: dict[str, dict[str, Callable[[Exchange], None]]] = {
            "/v1/chat/completions": {post: lambda exchange: self._generate(exchange, True)},
            "/v1/completions": {post: lambda exchange: self._generate(exchange, False)},
            "/v1/models": {get: self._models},
            "/tokenize": {post: self._tokenize},
            "/detokenize": {post: self._detokenize},
            "/health": {get: self._empty},
            "/ping": {get: self._empty, post: self._empty},
            "/version": {get: self._version},
            "/load": {get: self._load},
            "/metrics": {get: self._metrics},
            "/reset_prefix_cache": {post: self._reset},
            "/clock_scale": {post: self._clock_scale},
        }

    def handle(self, exchange: Exchange) -> None:
        """Answer one request, now or when its tokens come."""
        methods = self._routes.get(exchange.path)
        try:
            if methods is None:
                raise RoutingError(404, "Not Found")
            handler = methods.get(exchange.method)
            if handler is None:
                raise RoutingError(405, "Method Not Allowed")
            handler(exchange)
        except ApiError as error:
            exchange.respond(error.status, error.body())

    def _json(self, exchange: Exchange, value: object, status: int = 200) -> None:
        exchange.respond(status, msgspec.json.encode(value))

    def _empty(self, exchange: Exchange) -> None:
        exchange.respond(200, b"")

    def _models(self, exchange: Exchange) -> None:
        card = {
            "id": self.options.model,
            "object": "model",
            "created": self._started,
            "owned_by": "vllm",
            "root": self.options.calibration.model.name,
            "parent": None,
            "max_model_len": self.options.engine.max_model_len,
            "permission": [],
        }
        self._json(exchange, {"object": "list", "data": [card]})

    def _version(self, exchange: Exchange) -> None:
        self._json(
            exchange,
            {
                "version": f"{self.options.release}.0+sim",
                "simulated": True,
                "clock_scale": self.driver.clock.scale,
            },
        )

    def _load(self, exchange: Exchange) -> None:
        self._json(exchange, {"server_load": self.driver.engine.in_flight})

    def _metrics(self, exchange: Exchange) -> None:
        page = self.driver.metrics.page(self.driver.clock.scale)
        exchange.respond(200, page, "text/plain; version=0.0.4; charset=utf-8")

    def _reset(self, exchange: Exchange) -> None:
        if bodies.flag(exchange.query, "reset_running_requests"):
            message = "reset_running_requests is not simulated; wait until nothing runs."
            raise ApiError(501, message, "NotImplementedError")
        self._json(exchange, {"success": self.driver.engine.memory.pool.forget()})

    def _clock_scale(self, exchange: Exchange) -> None:
        scale = bodies.decode(exchange.body, bodies.ClockBody).clock_scale
        if not SLOWEST <= scale <= FASTEST:
            raise ApiError(
                400, f"clock_scale must be {SLOWEST} to {FASTEST:g}, got {scale}.", param="clock_scale"
            )
        if not self.driver.idle:
            raise ApiError(409, "clock_scale cannot change while requests are in flight.", "ConflictError")
        self.driver.clock.set_scale(scale)
        self._version(exchange)

    def _tokenize(self, exchange: Exchange) -> None:
        bodies.require_json(exchange.headers)
        body = bodies.decode(exchange.body, bodies.TokenizeBody)
        bodies.check_model(body.model, self.options.model)
        if body.messages is not None:
            opens = body.add_generation_prompt is not False
            text = render_chat([(message.role, message.text()) for message in body.messages], opens)
        elif body.prompt is not None:
            text = body.prompt.encode("utf-8", "surrogatepass")
        else:
            raise bodies.missing("body.prompt", "body.messages")
        numbers, pieces = self.vocabulary.encode(text)
        self._json(
            exchange,
            {
                "count": len(numbers),
                "max_model_len": self.options.engine.max_model_len,
                "tokens": numbers,
                "token_strs": pieces if body.return_token_strs else None,
            },
        )

    def _detokenize(self, exchange: Exchange) -> None:
        bodies.require_json(exchange.headers)
        body = bodies.decode(exchange.body, bodies.DetokenizeBody)
        bodies.check_model(body.model, self.options.model)
        self._json(exchange, {"prompt": self.vocabulary.decode(body.tokens)})

    def _generate(self, exchange: Exchange, chat: bool) -> None:
        bodies.require_json(exchange.headers)
        self.driver.arrive(exchange.arrived, lambda arrival: self._prepare(exchange, chat, arrival))

    def _prepare(self, exchange: Exchange, chat: bool, arrival: float) -> None:
        """Parse, tokenise and hash one request and submit it, outside the engine's clock."""
        if exchange.gone:
            return
        try:
            body: GenerationBody
            if chat:
                body = bodies.decode(exchange.body, ChatBody)
                text = self._chat_text(body)
            else:
                body = bodies.decode(exchange.body, CompletionBody)
                text = self._completion_text(body)
            exchange.body = b""
            self._submit(exchange, body, text, chat, arrival)
        except ApiError as error:
            exchange.respond(error.status, error.body())
        except Exception:
            # The edge of the server: a bug must neither leave the client waiting nor stop other streams.
            traceback.print_exc(file=sys.stderr)
            exchange.respond(
                500, bodies.error_body(500, "Internal server error", "InternalServerError", None)
            )

    def _chat_text(self, body: ChatBody) -> bytes:
        bodies.check_generation(body, self.options.model)
        if not body.messages:
            raise bodies.invalid(
                "Cannot apply chat template to an empty conversation. Provide at least one message."
            )
        opens = body.add_generation_prompt is not False
        return render_chat([(message.role, message.text()) for message in body.messages], opens)

    def _completion_text(self, body: CompletionBody) -> bytes:
        bodies.check_generation(body, self.options.model)
        prompt = body.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            only = prompt[0]
            prompt = only if isinstance(only, str) else [*only]
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, list) and all(isinstance(number, int) for number in prompt):
            text = self.vocabulary.decode(number for number in prompt if isinstance(number, int))
        else:
            raise bodies.invalid("This simulator takes one prompt per request.", "prompt")
        encoded = text.encode("utf-8", "surrogatepass")
        if not count_tokens(encoded):
            raise bodies.invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        return encoded

    def _submit(
        self,
        exchange: Exchange,
        body: GenerationBody,
        text: bytes,
        chat: bool,
        arrival: float,
    ) -> None:
        prompt = Prompt(text, self._unit, body.cache_salt or "")
        as_text = not (isinstance(body, CompletionBody) and body.numbers())
        limit = bodies.output_limit(body, prompt.tokens, self.options.engine.max_model_len, as_text)
        tokens, reason = limit, "length"
        if not body.ignore_eos:
            natural = max(prompt.answer.natural_length(), body.min_tokens)
            if natural <= limit:
                tokens, reason = natural, "stop"
                prompt.answer.end = natural - 1
        fault = self.faults.choose(exchange.headers, prompt.digest)
        if fault is not None and fault.kind in ("429", "503"):
            fault.refuse()
        given = body.request_id or exchange.headers.get("x-request-id", "")
        key = given if given.isascii() and given.replace("-", "").isalnum() else uuid.uuid4().hex
        request = Request(_PREFIX[chat] + key, prompt, prompt.tokens, tokens, reason)

        def gone() -> None:
            if request.state != State.DONE:
                self.driver.abort(request)

        exchange.on_gone = gone
        request.sink = self._sink(exchange, body, request, prompt, limit, fault)
        self.driver.submit(request, arrival)

    def _sink(
        self,
        exchange: Exchange,
        body: GenerationBody,
        request: Request,
        prompt: Prompt,
        limit: int,
        fault: Fault | None,
    ) -> Sink:
        chat = isinstance(body, ChatBody)
        reply = Reply(exchange, request, prompt.answer, self.options.model, chat, limit)
        if not body.stream:
            return WholeReply(reply) if fault is None else FaultyWhole(reply, fault)
        options = body.stream_options or bodies.StreamOptions()
        usage = bool(options.include_usage)
        continuous = usage and bool(options.continuous_usage_stats)
        if fault is None:
            return StreamReply(reply, usage, continuous)
        return FaultyStream(reply, usage, continuous, fault, self.driver.clock.scale)

"""Cards of models as engines list them at `/v1/models`, for the gateway's own answers about models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from msgspec import Raw

from kvroute.http.client.call import Failure, ResponseHandler
from kvroute.serve.api.json_fields import RequestError
from kvroute.serve.api.passthrough_paths import MODELS
from kvroute.serve.proxy.legs.passthrough import answerers

if TYPE_CHECKING:
    from kvroute.http.client_exchange import ClientExchange
    from kvroute.http.headers import Headers
    from kvroute.serve.proxy.runtime import ClusterRuntime

Card: TypeAlias = dict[str, Raw]
_ANSWER_S = 2.0
"""Time limit for an engine to respond."""
_KEPT_S = 10.0
"""Time for which a list is not requested again."""
_BYTES_MAX = 1 << 20


class _List(msgspec.Struct):
    data: list[Card] = []


_decode = msgspec.json.Decoder(_List).decode


class ModelCards:
    """Requests the lists of engines and keeps them for a short time."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, list[Card]]] = {}
        """End of validity and cards, by the cluster's name of a model."""
        self._turn = 0

    async def card(self, runtime: ClusterRuntime, exchange: ClientExchange, name: str) -> bytes | None:
        """Return the card, in JSON, of a model that an engine lists under this name; None: none does."""
        card = _card_of(await self._of("", runtime, exchange), name)
        return None if card is None else msgspec.json.encode(card)

    async def contexts(
        self, runtime: ClusterRuntime, exchange: ClientExchange, names: Iterable[str]
    ) -> dict[str, int | None]:
        """Return the tokens of the context of models, by their names for clients; None: unknown."""
        found: dict[str, int | None] = {}
        for name in names:
            found[name] = None
            with suppress(RequestError):  # no engine of its model is known at present
                base = runtime.reading.models.name(name)
                cards = await self._of(base, runtime, exchange)
                found[name] = _context_tokens(cards, (name, runtime.reading.models.full_name(base)))
        return found

    async def _of(self, model: str, runtime: ClusterRuntime, exchange: ClientExchange) -> list[Card]:
        """Return the cards of an engine that serves a model (empty: any); none if no engine responds with a list."""
        now = runtime.now()
        until, cards = self._kept.get(model, (0.0, []))
        if now < until:
            return cards
        self._turn += 1
        engine = next(answerers(runtime.engines.values(), model, self._turn), None)
        if engine is None:
            return []
        sink = _Reader()
        head = runtime.engine_headers.lines(exchange.headers, exchange.request_id)
        request = b"GET %b HTTP/1.1\r\nhost: %b\r\n%b%b\r\n" % (MODELS, engine.pool.host, head, engine.rank_head)
        engine.pool.send(request, sink, first_byte_s=_ANSWER_S, idle_s=_ANSWER_S)
        found = await sink.cards
        if found:
            self._kept[model] = (now + _KEPT_S, found)
        return found


class _Reader(ResponseHandler):
    """Receives an engine's list."""

    def __init__(self) -> None:
        self.cards: asyncio.Future[list[Card]] = asyncio.get_running_loop().create_future()
        self._status, self._body = 0, bytearray()

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def on_body(self, data: bytes) -> None:
        if len(self._body) <= _BYTES_MAX:
            self._body += data

    def on_end(self) -> None:
        found: list[Card] = []
        if self._status == 200 and len(self._body) <= _BYTES_MAX:
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                found = _decode(self._body).data
        self._set(found)

    def on_failure(self, failure: Failure) -> None:
        self._set([])

    def _set(self, cards: list[Card]) -> None:
        if not self.cards.done():
            self.cards.set_result(cards)


def _card_of(cards: Iterable[Card], name: str) -> Card | None:
    """Return the card of a model's name; None: there is none."""
    quoted = msgspec.json.encode(name)
    for card in cards:
        raw = bytes(card.get("id", b""))
        if raw == quoted or (b"\\" in raw and msgspec.json.decode(raw) == name):
            return card
    return None


def _context_tokens(cards: list[Card], names: Iterable[str]) -> int | None:
    """Return the context length of a model, from the first of these names that has a card, else from the first card;
    None: unknown."""
    named = next((card for name in names if (card := _card_of(cards, name)) is not None), None)
    card = named or (cards[0] if cards else {})
    text = bytes(card.get("max_model_len", b""))
    return int(text) if text.isdigit() and len(text) < 16 else None

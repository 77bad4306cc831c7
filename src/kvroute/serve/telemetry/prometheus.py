"""Congestion from a Prometheus server: one query per tier, or one with a series per link, as events for `Control`.

When a query fails, nothing is emitted: the last good values remain, and the oracle lets them decay.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence

import aiohttp
import msgspec
from yarl import URL

from kvroute.serve.config.settings import TIERS, PrometheusSettings
from kvroute.serve.observe.logs import log_event
from kvroute.types import CongestionMeasured, Event, LinksMeasured

_ANSWER_BYTES_MAX = 32 << 20
_BACKOFF_MAX_S = 60.0
_ROUNDING = 1e-9
_SHARE_MAX = 1.5
"""A counter's rate may slightly exceed a link's capacity; a much larger value has the wrong unit."""


class TelemetryError(ValueError):
    """The server does not respond, or its response does not fit the query; the message says which."""


class _Series(msgspec.Struct):
    metric: dict[str, str] = {}
    value: tuple[float, str] = (0.0, "")


class _Scalar(msgspec.Struct, tag_field="resultType", tag="scalar"):
    result: tuple[float, str]


class _Vector(msgspec.Struct, tag_field="resultType", tag="vector"):
    result: list[_Series]


class _Reply(msgspec.Struct):
    status: str
    data: _Scalar | _Vector | None = None
    error: str = ""


_REPLY = msgspec.json.Decoder(_Reply)
Samples = list[tuple[dict[str, str], float]]
"""Labels and value of each series."""


def read_reply(body: bytes) -> Samples:
    """Return an instant query's result; a scalar has no labels.

    Raises:
        TelemetryError: the response is not a vector or scalar, or the server reports an error.
    """
    try:
        reply = _REPLY.decode(body)
        if reply.status != "success" or reply.data is None:
            raise TelemetryError(f"the query failed: {reply.error or reply.status}")
        if isinstance(reply.data, _Scalar):
            return [({}, float(reply.data.result[1]))]
        return [(series.metric, float(series.value[1])) for series in reply.data.result]
    except (msgspec.DecodeError, ValueError) as error:
        if isinstance(error, TelemetryError):
            raise
        raise TelemetryError(f"the response is not a vector of an instant query ({error})") from None


def tier_value(tier: str, samples: Samples) -> float:
    """Return the utilisation of one tier. Raises TelemetryError unless the result is one share."""
    if len(samples) != 1:
        hint = "aggregate them, e.g. with avg()" if samples else "check that its metric is exported"
        raise TelemetryError(f"the query for {tier} returns {len(samples)} series instead of one; {hint}")
    return _share(samples[0][1], tier)


def _share(value: float, where: str) -> float:
    if not -_ROUNDING <= value <= _SHARE_MAX:
        raise TelemetryError(f"{value:g} for {where} is not a share of capacity; write a query with a result in [0, 1)")
    return max(value, 0.0)


class LinkReader:
    """Converts series by link name to the cluster's link order; warns once of missing and once of unknown links."""

    def __init__(self, links: Sequence[str], label: str) -> None:
        """Args: names of all links by id; the label that holds a link's name."""
        self._position = {name: number for number, name in enumerate(links)}
        self._label = label
        self._warned: set[str] = set()

    def utilisation(self, samples: Samples) -> tuple[float, ...]:
        """Return the utilisation by link id; 0 for a link without a series or with a value of NaN (0/0 while idle).

        Raises:
            TelemetryError: no link has a series, a link has several, or a value is not a share.
        """
        found: dict[int, float] = {}
        unknown = []
        for labels, value in samples:
            name = labels.get(self._label, "")
            number = self._position.get(name)
            if number is None:
                unknown.append(name)
            elif number in found:
                raise TelemetryError(f"several series for link {name}; aggregate them by ({self._label})")
            else:
                found[number] = 0.0 if math.isnan(value) else _share(value, f"link {name}")
        if not found:
            raise TelemetryError(f"none of {len(samples)} series has the name of a link in its label {self._label!r}")
        self._warn("telemetry_of_unknown_links", unknown)
        if len(found) < len(self._position):
            self._warn("telemetry_lacks_links", [name for name, at in self._position.items() if at not in found])
        return tuple([found.get(number, 0.0) for number in range(len(self._position))])

    def relink(self, links: Sequence[str]) -> None:
        """Use other links from now on. Args: names of all links by id."""
        self._position = {name: number for number, name in enumerate(links)}

    def _warn(self, event: str, names: list[str]) -> None:
        if names and event not in self._warned:
            self._warned.add(event)
            log_event(
                "warning", event, count=len(names), reason=", ".join(names[:5]) + ("..." if len(names) > 5 else "")
            )


class PrometheusSource:
    """Queries once per interval from `start` to `close`; failures lengthen the wait, with random jitter."""

    def __init__(
        self,
        settings: PrometheusSettings,
        links: Sequence[str],
        emit: Callable[[Event], None],
        now: Callable[[], float],
        chance: random.Random,
    ) -> None:
        """
        Args:
            settings: the server and its queries.
            links: names of the cluster's links by id.
            emit: receives CongestionMeasured or LinksMeasured.
            now: clock of these events, in seconds.
            chance: random generator that spreads the queries of many gateways after an outage.
        """
        self.failure = ""
        """Error of the last query; empty if it succeeded."""
        self._settings = settings
        self._tiers: Mapping[str, str] = {str(tier): query for tier, query in (settings.per_tier or {}).items()}
        self._reader = LinkReader(links, settings.per_link.label) if settings.per_link else None
        url = URL(str(settings.url))
        self._url = url / "api/v1/query"
        self._emit = emit
        self._now = now
        self._chance = chance
        self._failures = 0
        self._task: asyncio.Task[None] | None = None

    def relink(self, links: Sequence[str]) -> None:
        """Report by other links from now on. Args: names of the cluster's links by id."""
        if self._reader is not None:
            self._reader.relink(links)

    def start(self) -> None:
        """Start, from within the loop."""
        assert self._task is None
        self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        """Stop querying; `closed` waits until the connections are closed."""
        if self._task is not None:
            self._task.cancel()

    async def closed(self) -> None:
        """Wait until all resources are released, after `close`."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=float(self._settings.timeout_s))
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                await self._round(session)
                await asyncio.sleep(self._wait_s())

    def _wait_s(self) -> float:
        interval_s = float(self._settings.interval_s)
        if not self._failures:
            return interval_s
        longest_s = max(_BACKOFF_MAX_S, interval_s)
        return min(interval_s * 2.0 ** min(self._failures - 1, 20), longest_s) * self._chance.uniform(0.5, 1.5)

    async def _round(self, session: aiohttp.ClientSession) -> None:
        try:
            event = await self._measure(session)
        except (TelemetryError, aiohttp.ClientError, TimeoutError) as error:
            text = str(error) or ("the request timed out" if isinstance(error, TimeoutError) else type(error).__name__)
            if not self._failures:
                log_event("warning", "telemetry_failed", url=str(self._settings.url), reason=text)
            self._failures += 1
            self.failure = text
            return
        if self._failures:
            log_event("info", "telemetry_recovered", url=str(self._settings.url))
        self._failures, self.failure = 0, ""
        self._emit(event)

    async def _measure(self, session: aiohttp.ClientSession) -> Event:
        if self._reader is not None and self._settings.per_link is not None:
            utilisation = self._reader.utilisation(await self._query(session, self._settings.per_link.query))
            return LinksMeasured(self._now(), utilisation)
        values = {tier: tier_value(tier, await self._query(session, query)) for tier, query in self._tiers.items()}
        return CongestionMeasured(self._now(), tuple([values.get(tier, 0.0) for tier in TIERS]))

    async def _query(self, session: aiohttp.ClientSession, query: str) -> Samples:
        async with session.post(self._url, data={"query": query}) as response:
            if response.content_type != "application/json":
                raise TelemetryError(f"HTTP status {response.status} without JSON; the URL must be a Prometheus server")
            body = bytearray()
            async for part in response.content.iter_any():
                body += part
                if len(body) > _ANSWER_BYTES_MAX:
                    raise TelemetryError(f"the response is longer than {_ANSWER_BYTES_MAX} bytes")
            return read_reply(bytes(body))

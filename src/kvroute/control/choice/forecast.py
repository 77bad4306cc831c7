"""Predicts the time to the first token of a request from the terms of the decision about it, and its work in seconds.

It books nothing: a request that would be too late is rejected before anything is booked.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from kvroute.control.booking import Booking
from kvroute.control.choice.pairing import AggregatedPick
from kvroute.control.choice.partners import Partners
from kvroute.control.offers import DecodePick, Feature, Placed
from kvroute.control.view import ClusterView, PoolKey
from kvroute.policies import PrefillCandidates, queue_and_decode_s
from kvroute.timing import prefill_each_s, prefill_time
from kvroute.types import Reject, Request


class Forecast(NamedTuple):
    """A predicted time to the first token, in seconds."""

    ttft_s: float
    least_s: float
    """The same without waiting for other requests."""


class Backlog(NamedTuple):
    """How far the instances of a model are from taking one more request at once."""

    work_s: float
    """Predicted work ahead on the prefill instance that has the least, in seconds; 0.0 if none is up."""
    running: int
    """Requests on all instances, those of other gateways and routers included."""
    slots: int
    """Batch slots of the decode instances that are up."""
    instances: int
    """Instances that are up; one that both prefills and decodes counts twice."""


class Forecaster(Feature[None]):
    """Predicts by a view, which it does not change."""

    def __init__(self, view: ClusterView, partners: Partners) -> None:
        self._view, self._partners = view, partners

    def attach(self, booking: Booking, placed: Placed, offered: None) -> Reject | None:
        """Predict a request that has been offered prefill instances; return a Reject if it would be too late."""
        offer = placed.offer
        if offer is not None and self.predicts(booking):
            pick = placed.pick or self._partners.partner(booking, placed.at, placed.position, early=True)
            late = self.foreseen(booking, self.pair(offer.candidates, placed.position, pick, early=offer.layerwise))
            if late is not None:
                return late
        if booking.ttft_s is not None:
            placed.decision = msgspec.structs.replace(placed.decision, ttft_s=booking.ttft_s)
        return None

    def predicts(self, booking: Booking) -> bool:
        """Whether the time to the first token of a request is to be predicted."""
        return self._view.options.predicts or booking.ttft_max_s is not None

    def foreseen(self, booking: Booking, forecast: Forecast) -> Reject | None:
        """Store the prediction for a request that is not booked yet; return a Reject if it would be too late."""
        most_s = booking.ttft_max_s
        if most_s is not None and forecast.ttft_s > most_s:
            reason = f"the first token is expected in {forecast.ttft_s:.3g} s, and {max(most_s, 0.0):.3g} s are left"
            return Reject(booking.request.id, reason, ttft_s=forecast.ttft_s, least_s=forecast.least_s)
        booking.ttft_s, booking.ttft_max_s = forecast.ttft_s, None
        return None

    def pair(
        self, candidates: PrefillCandidates, position: int, pick: DecodePick | Reject | None, *, early: bool
    ) -> Forecast:
        """Predict a request that is prefilled on one instance.

        Args:
            candidates: the prefill instances.
            position: the chosen one.
            pick: the decode instance as it would be chosen now; a Reject: none has room now, None: the prefill
                instance decodes. Then the first token comes with the end of the prefill, as far as is known.
            early: whether the KV cache is sent while it is computed.
        """
        prefill_s = float(candidates.prefill_s[position])
        after = self._after(pick, hidden_s=prefill_s if early else 0.0) if isinstance(pick, DecodePick) else NOTHING
        pending_s = float(candidates.pending_s[position])
        return Forecast(pending_s + prefill_s + after.ttft_s, prefill_s + after.least_s)

    def aggregated(self, pick: AggregatedPick) -> Forecast:
        """Predict an aggregated request, which one instance serves because that is cheaper than a pair.

        Beside a batch, its prompt begins with the next step: in the mean half a step later.
        """
        index, parts, candidates = pick.pick.choice.index, pick.pick.choice.terms.parts, pick.pick.candidates
        least_s, steps_s = float(parts["prefill_s"][index]), float(parts["steps_s"][index])
        begins_s = 0.0
        if steps_s:
            batch = int(candidates.batch[index])
            begins_s = float(candidates.iteration_base_s[index] + candidates.iteration_per_request_s[index] * batch) / 2
        return Forecast(float(parts["wait_s"][index]) + begins_s + least_s + steps_s, least_s)

    def single(self, request: Request, key: PoolKey, pick: DecodePick, at: float) -> Forecast:
        """Predict a request of one leg. Args: `key`: of the pool of its instance."""
        view, index = self._view, pick.choice.index
        pool = view.decode[key]
        timing = view.cluster.timing[view.cluster.instances[int(pool.ids[index])].timing]
        hit_tokens = np.minimum(pick.candidates.hit_tokens[index : index + 1], max(request.input_tokens - 1, 0))
        prefill_s = float(prefill_each_s(prefill_time(timing.prefill), request.input_tokens, hit_tokens)[0])
        after = self._after(pick, hidden_s=0.0)
        return Forecast(float(pool.prompts_s(at)[index]) + prefill_s + after.ttft_s, prefill_s + after.least_s)

    def _after(self, pick: DecodePick, *, hidden_s: float) -> Forecast:
        """Predict the time from the end of the prefill. Args: `hidden_s`: part of the transfer that runs before it."""
        candidates, index = pick.candidates, pick.choice.index
        parts, cluster = pick.choice.terms.parts, self._view.cluster
        kv_bytes = float(candidates.kv_bytes[index])
        if "transfer_s" in parts:
            transfer_s = float(parts["transfer_s"][index])
        elif kv_bytes:
            transfer_s = kv_bytes / float(cluster.tier_bytes_per_s[pick.tier])
            transfer_s += float(cluster.tier_latency_s[pick.tier])
        else:
            transfer_s = 0.0
        queue_s, step_s = queue_and_decode_s(candidates)
        idle_step_s = float(candidates.iteration_base_s[index] + candidates.iteration_per_request_s[index])
        transfer_s = max(transfer_s - hidden_s, 0.0)
        return Forecast(transfer_s + float(queue_s[index] + step_s[index]), transfer_s + idle_step_s)

    def work_s(self, request: Request, model: str, candidates: PrefillCandidates, output_tokens: float) -> float:
        """Return the seconds of work of a request on its instances: its prefill where that ends soonest, and its share
        of the decode steps of a full batch.

        Args:
            request: the request.
            model: its model.
            candidates: the prefill instances.
            output_tokens: assumed length of the output.
        """
        finish_s = candidates.pending_s + candidates.prefill_s
        if candidates.allowed is not None and candidates.allowed.any():
            finish_s = np.where(candidates.allowed, finish_s, np.inf)
        work_s = float(candidates.prefill_s[int(finish_s.argmin())]) if len(finish_s) else 0.0
        tokens = min(output_tokens, request.max_output_tokens or output_tokens)
        rates = [
            float((pool.iteration_base_s / pool.batch_max + pool.iteration_per_request_s).mean())
            for (name, _), pool in self._view.decode.items()
            if name == model
        ]
        return work_s + tokens * (sum(rates) / len(rates) if rates else 0.0)

    def backlog(self, model: str, at: float) -> Backlog:
        """Return how busy the instances of a model are."""
        prefill = self._view.prefill[model]
        work_s = float(prefill.pending_s(at)[prefill.up].min()) if prefill.up.any() else 0.0
        running, slots = int(prefill.assigned.sum() + prefill.others.sum()), 0
        up = int(prefill.up.sum())
        for (name, _), pool in self._view.decode.items():
            if name == model:
                running += int(pool.batch.sum() + pool.queued.sum())
                slots += int(pool.batch_max[pool.up].sum())
                up += int(pool.up.sum())
        return Backlog(work_s, running, slots, up)


NOTHING = Forecast(0.0, 0.0)

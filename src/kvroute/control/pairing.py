"""Chooses the prefill instance together with its decode instance if the policy supports it; books nothing."""

from __future__ import annotations

from kvroute.control.pool import DecodePool
from kvroute.control.transfer_tracker import TransferTracker
from kvroute.control.view import ClusterView
from kvroute.policies import JointPath, PairingPolicy, PairPolicy, PrefillCandidates
from kvroute.types import Candidates, Choice, Reject, Request


class Pairing:
    """Uses the acting decode policy if it is a `PairingPolicy`. Otherwise, or if the request has no such pair, the
    prefill policy's choice is kept."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        policy, state = view.settings.decode_policy, view.states.acting
        self._tracker = state if isinstance(state, TransferTracker) else None
        self._policy: PairPolicy | None = None
        if isinstance(policy, PairingPolicy):
            self._policy = policy.pair_policy(view.settings.constraint)
        self._separable = {model: self._splits(model) for model in view.models}

    def prefill(self, request: Request, model: str, candidates: PrefillCandidates, choice: Choice, at: float) -> Choice:
        """Return the prefill instance, given the prefill policy's choice.

        That choice is kept if instances both prefill and decode, if they receive both legs at once, or if no decode
        instance has room for the KV cache now: one may have room when the prefill has ended.
        """
        if self._policy is None or not self._separable[model]:
            return choice
        turn, by_protocol = self._view.prefill[model].decisions, dict[str, Candidates]()

        def joint_path(position: int) -> JointPath | None:
            return self._joint_path(request, model, candidates, position, at, by_protocol)

        pair = self._policy.choose(request, candidates, joint_path, turn)
        return choice if isinstance(pair, Reject) else pair.prefill

    def _splits(self, model: str) -> bool:
        """Whether every prefill instance of a model ends its leg before the decode leg starts."""
        cluster = self._view.cluster
        instances = (cluster.instances[index] for index in self._view.prefill[model].ids.tolist())
        return all(instance.role != "both" and not instance.traits.concurrent_legs for instance in instances)

    def _joint_path(
        self,
        request: Request,
        model: str,
        candidates: PrefillCandidates,
        position: int,
        at: float,
        by_protocol: dict[str, Candidates],
    ) -> JointPath | None:
        """The decode candidates for this prefill instance and the predicted network between them. `by_protocol`
        caches the candidates."""
        view = self._view
        source = int(view.prefill[model].ids[position])
        protocol = view.cluster.instances[source].protocol
        pool = view.decode.get((model, protocol))
        if pool is None or self._tracker is None:
            return None
        if protocol not in by_protocol:
            by_protocol[protocol] = self._decode_candidates(request, model, pool)
        costs = view.oracle.costs(source, pool.ids, at)
        starts_s = float(candidates.pending_s[position] + candidates.prefill_s[position])
        return JointPath(by_protocol[protocol], costs, self._tracker.sight(source, pool.ids, costs, at, starts_s))

    def _decode_candidates(self, request: Request, model: str, pool: DecodePool) -> Candidates:
        view = self._view
        usable = None if pool.open else pool.up & pool.partner
        hit_tokens = view.caches.hit_tokens(request, pool.ids, request.input_tokens)
        return pool.candidates(request, view.models[model], hit_tokens, view.options.reserve_bytes, usable)

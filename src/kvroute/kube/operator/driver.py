"""The operator as a process: caches, leader election, reconciles with retries, and the webhook."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx2

from kvroute.kube.admission.certificates import CertificatePair, webhook_names
from kvroute.kube.admission.injection import InjectionSpec
from kvroute.kube.admission.router_checks import FileCheck
from kvroute.kube.admission.server import WebhookServer
from kvroute.kube.admission.validation import AdmissionView
from kvroute.kube.api.informer import DEFAULT_TIMING, Timing
from kvroute.kube.api.requests import ApiRefused
from kvroute.kube.operator.api_calls import ApiCalls
from kvroute.kube.operator.caches import ABSENT_S, WatchedObjects
from kvroute.kube.operator.election import GIVE_UP_S, RENEW_S, Create, LeaderCandidate, Update
from kvroute.kube.operator.execution import FAILURES, Execution
from kvroute.kube.operator.observed import OperatorSpec
from kvroute.kube.operator.reconcile import reconcile
from kvroute.kube.operator.rights import LEASE, LEASES, OWNED
from kvroute.kube.operator.webhook_certificates import current_pair, pair_of_folder
from kvroute.topology import parse

_LOGGER = logging.getLogger("kvroute.operator")
_SERVICE = "kvroute-webhook"
_RELEASES = 3


@dataclass(frozen=True, slots=True)
class OperatorDriverSpec:
    """How the operator runs."""

    operator: OperatorSpec
    identity: str
    """Name in the Lease, unique among operators: the pod's name."""
    port: int | None = 9443
    """Port of the webhook; 0: any; None: no webhook."""
    host: str = "0.0.0.0"
    certificates: Path | None = None
    """Folder with `tls.crt` and `tls.key`; None: the operator makes its certificates itself."""
    names: tuple[str, ...] = ()
    """DNS names of the webhook; empty: those of its Service."""
    renew_s: float = RENEW_S
    give_up_s: float = GIVE_UP_S
    resync_s: float = 10.0
    """Time after which everything is compared again, even if no event has come."""
    absent_s: float = ABSENT_S
    """Highest pause between two looks for a kind that need not be installed."""
    quiet_s: float = 0.05
    """Changes within this time are reconciled together."""
    certificates_s: float = 60.0
    retry_first_s: float = 0.2
    retry_max_s: float = 30.0
    retry_changed_s: float = 1.0
    """Pause after a failure if something changes: a new pod must not wait because another object is refused."""
    timing: Timing = field(default_factory=lambda: DEFAULT_TIMING)
    check_file: FileCheck = parse
    """Reads a cluster file as a gateway does; KvRouters whose file it refuses are rejected."""


class OperatorDriver:
    """Runs until it is cancelled."""

    def __init__(self, connect: Callable[[], httpx2.AsyncClient], settings: OperatorDriverSpec) -> None:
        self._settings = settings
        self._changed = asyncio.Event()
        self._caches = WatchedObjects(connect, self._changed.set, settings.timing, settings.absent_s)
        self._calls, self._lease_calls, self._certificate_calls = (ApiCalls(connect) for _ in range(3))
        self._candidate = LeaderCandidate(settings.identity, settings.give_up_s)
        self._webhook: WebhookServer | None = None
        self._service_monitors, self._service_monitors_due_s = False, 0.0
        self.webhook_port = 0
        """Port on which the webhook listens; 0: it does not listen yet."""
        self.pair: CertificatePair | None = None
        """The certificate that the webhook serves."""

    @property
    def leads(self) -> bool:
        """Whether this operator may change the cluster."""
        return self._candidate.leads(time.monotonic())

    async def run(self) -> None:
        """Follow the cluster, take part in the election, reconcile while leading, and answer admission reviews."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._caches.run())
                group.create_task(self._elections())
                group.create_task(self._reconciles())
                if self._settings.port is not None:
                    group.create_task(self._webhooks(self._settings.port))
        finally:
            await self._end()

    async def _end(self) -> None:
        """Give up the Lease, so that another operator leads at once, and close everything."""
        with contextlib.suppress(ApiRefused, *FAILURES):
            for _ in range(_RELEASES):  # a renewal in progress may still change the Lease
                lease = await self._lease_calls.get(LEASES, self._settings.operator.namespace, LEASE)
                step = self._candidate.release(lease, time.time())
                if step == "wait" or await self._write(lease, step):
                    break
        if self._webhook is not None:
            await self._webhook.stop()
        for calls in (self._calls, self._lease_calls, self._certificate_calls):
            await calls.close()

    async def _elections(self) -> None:
        led = False
        while True:
            before = time.monotonic()
            try:
                lease = await self._lease_calls.get(LEASES, self._settings.operator.namespace, LEASE)
                step = self._candidate.step(lease, before, time.time())
                if await self._write(lease, step):
                    self._candidate.written(before)
                else:
                    self._candidate.lost()
            except (ApiRefused, *FAILURES) as error:
                _LOGGER.warning("the Lease cannot be read or written: %s", error)
            if self.leads != led:
                led = self.leads
                _LOGGER.info("this operator leads") if led else _LOGGER.warning("this operator does not lead any more")
                self._changed.set()
            await asyncio.sleep(self._settings.renew_s)

    async def _write(self, lease: dict[str, object] | None, step: Create | Update | str) -> bool:
        """Write the Lease; return whether this operator holds it now."""
        namespace = self._settings.operator.namespace
        match step:
            case Create(spec):
                metadata = {"name": LEASE, "namespace": namespace}
                body = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": spec}
                return await self._lease_calls.create(LEASES, namespace, body) is not None
            case Update(spec):
                assert lease is not None, "an update follows a read"
                return await self._lease_calls.update(LEASES, namespace, lease | {"spec": spec}) is not None
        return False

    async def _reconciles(self) -> None:
        """Reconcile after changes, after a time without any, and again after failures, with growing pauses."""
        settings = self._settings
        least_s, pause_s, failures = 0.0, settings.resync_s, 0
        while True:
            await asyncio.sleep(least_s)
            # Not asyncio.wait_for: up to Python 3.11 it ignores a cancellation that comes with the change.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(pause_s - least_s, 0.0)):
                    await self._changed.wait()
            if not failures:
                await asyncio.sleep(settings.quiet_s)
            self._changed.clear()
            if not self.leads or not self._caches.complete:
                least_s, pause_s, failures = 0.0, settings.resync_s, 0
                continue
            failed, after_s = await self._reconcile()
            failures = failures + 1 if failed else 0
            if failures:
                backoff_s = min(settings.retry_first_s * 2.0 ** min(failures - 1, 10), settings.retry_max_s)
                least_s, pause_s = max(min(backoff_s, settings.retry_changed_s), after_s), max(backoff_s, after_s)
            else:
                least_s, pause_s = 0.0, settings.resync_s

    async def _reconcile(self) -> tuple[bool, float]:
        """Reconcile once; return whether something failed, and how long the server wants to be left alone."""
        settings = self._settings.operator
        execution = Execution(self._calls, self._settings.identity, time.time(), lambda: self.leads)
        try:
            service_monitors = await self._has_service_monitors(time.monotonic())
            observed = await self._caches.snapshot(self._calls, settings, service_monitors=service_monitors)
            await execution.run(reconcile(observed, time.time()))
            return execution.failures > 0, execution.retry_after_s
        except (ApiRefused, *FAILURES) as error:
            failure: BaseException = error
        except ExceptionGroup as group:
            failure = group.exceptions[0]
            if not isinstance(failure, (ApiRefused, *FAILURES)):
                raise
        _LOGGER.warning("the API server refuses or does not answer: %s", failure)
        return True, 0.0

    async def _has_service_monitors(self, now: float) -> bool:
        """Return whether the server has ServiceMonitors, which need not be installed."""
        if now >= self._service_monitors_due_s:
            self._service_monitors = await self._calls.serves(OWNED[-1])
            self._service_monitors_due_s = now + self._settings.absent_s
        return self._service_monitors

    async def _webhooks(self, port: int) -> None:
        """Serve admission reviews, from the first certificate on, and renew certificates."""
        names = self._settings.names or webhook_names(_SERVICE, self._settings.operator.namespace)
        while True:
            try:
                pair = await self._pair(names)
            except (ApiRefused, *FAILURES) as error:
                _LOGGER.warning("the webhook's certificate cannot be read or written: %s", error)
                pair = None
            if pair is not None and pair != self.pair:
                await self._serve(pair, port)
            await asyncio.sleep(self._settings.certificates_s if pair is not None else min(2.0, self._settings.renew_s))

    async def _pair(self, names: tuple[str, ...]) -> CertificatePair | None:
        if self._settings.certificates is not None:
            return pair_of_folder(self._settings.certificates)
        return await current_pair(self._certificate_calls, self._settings.operator.namespace, names)

    def _view(self) -> AdmissionView | None:
        """Return what admission checks read; None until the cluster has been read."""
        view = self._caches.view()
        return None if view is None else replace(view, check_file=self._settings.check_file)

    async def _serve(self, pair: CertificatePair, port: int) -> None:
        if self._webhook is None:
            injection = InjectionSpec(self._settings.operator.image, self._settings.operator.pull_secrets)
            webhook = WebhookServer(self._view, injection, pair)
            self.webhook_port = await webhook.start(self._settings.host, port)
            self._webhook = webhook
        else:
            self._webhook.use(pair)
        self.pair = pair
        _LOGGER.info("the webhook serves a certificate that ends at %s", time.ctime(pair.ends_s))

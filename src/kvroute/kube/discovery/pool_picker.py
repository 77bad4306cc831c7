"""Checks whether an InferencePool names this picker, for as long as the pool does not change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvroute.kube.api.client import Access
from kvroute.kube.api.inference_pool import PickerReference, Service, reference_faults
from kvroute.kube.api.informer import FAILURES
from kvroute.kube.api.requests import HEADERS, SERVICES, close_client
from kvroute.types import InputError, OwnPicker

_CHECK_S = 60.0
"""Interval between two checks: the Service may be created, changed or deleted without a change of the pool."""
_ANSWER_S = 10.0
"""Longest time that one answer may take."""


@dataclass(frozen=True, slots=True)
class Services:
    """The Services of a namespace."""

    access: Access
    namespace: str

    async def get(self, name: str) -> tuple[Service | None, bool]:
        """Return a Service (None: there is none), and whether the server has told."""
        try:
            client = self.access.connect()
            try:
                url = f"{SERVICES.url(self.namespace)}/{name}"
                response = await client.get(url, headers=HEADERS, timeout=_ANSWER_S)
            finally:
                await close_client(client)
            if response.status_code == 200:
                return msgspec.json.decode(response.content, type=Service), True
            return None, response.status_code == 404
        except FAILURES:
            return None, False


class PickerCheck:
    """Checks one reference after the other, in a task of its own."""

    def __init__(self, services: Services, own: OwnPicker | None, on_change: Callable[[], None]) -> None:
        """
        Args:
            own: this picker; None: gateways need not ask this process, so nothing is checked.
            on_change: called after each check.
        """
        self._services, self._own, self._on_change = services, own, on_change
        self._reference: PickerReference | None = None
        self._task: asyncio.Task[None] | None = None
        self.faults: tuple[InputError, ...] = ()
        """Why gateways that follow the reference would not ask this picker as it expects."""

    def follow(self, reference: PickerReference | None, tasks: asyncio.TaskGroup) -> None:
        """Check this reference from now on; None: there is none, as the API allows."""
        if reference == self._reference:
            return
        self._reference, self.faults = reference, ()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if reference is not None and self._own is not None:
            self._task = tasks.create_task(self._run(reference, self._own))

    async def _run(self, reference: PickerReference, own: OwnPicker) -> None:
        while True:
            service, known = await self._services.get(reference.name)
            self.faults = tuple(reference_faults(reference, own, service, known=known))
            self._on_change()
            await asyncio.sleep(_CHECK_S)

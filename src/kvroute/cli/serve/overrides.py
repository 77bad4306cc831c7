"""Settings of the gateway that options of the command line replace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvroute.types import InputError

if TYPE_CHECKING:
    from kvroute.serve.config.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class Overrides:
    """Options of the command line; None: the file's setting."""

    policy: str | None = None
    shadow: str | None = None
    prefill: str | None = None
    constraint: str | None = None
    host: str | None = None
    port: int | None = None
    admin_port: int | None = None
    log: Path | None = None
    log_format: str | None = None

    def applied(self, settings: GatewaySettings) -> GatewaySettings:
        """Return the file's settings, overridden by the options.

        Raises:
            InputError: a policy does not exist, or both ports are the same.
        """
        from kvroute.policies import known_parameters

        replace = msgspec.structs.replace
        listen, admin, logs = settings.listen, settings.admin, settings.log
        listen = replace(listen, host=self.host or listen.host, port=listen.port if self.port is None else self.port)
        admin = replace(admin, port=admin.port if self.admin_port is None else self.admin_port)
        if listen.port == admin.port != 0:
            hint = "give --port and --admin-port different numbers"
            raise InputError(f"clients and the admin endpoints would share port {admin.port}", hint=hint)
        events = str(self.log.absolute()) if self.log else logs.events
        policy, parameters = self.policy or settings.policy, settings.parameters
        changed = replace(
            settings,
            listen=listen,
            admin=admin,
            log=replace(logs, events=events, format=self.log_format or logs.format),
            policy=policy,
            parameters=parameters if policy == settings.policy else known_parameters(policy, parameters),
            shadow=settings.shadow if self.shadow is None else self.shadow,
            prefill=self.prefill or settings.prefill,
            constraint=settings.constraint if self.constraint is None else self.constraint,
        )
        changed.control_spec().check()
        return changed

    def remarks(self, settings: GatewaySettings) -> list[str]:
        """Return what the user should know of these options. Args: `settings`: those of the file."""
        from kvroute.serve.config.policy import without_effect

        return list(without_effect(settings.policy, settings.parameters, [self.policy or settings.policy]))

    def arguments(self) -> list[str]:
        """Return the same options for another process."""
        options = {name.replace("_", "-"): getattr(self, name) for name in self.__slots__}
        return [f"--{name}={value}" for name, value in options.items() if value is not None]

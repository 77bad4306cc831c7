"""Cache salts: separate the engines' prefix caches by API key or by tenant. The module reads and sends no request.

vLLM and SGLang hash `cache_salt` with a prompt's first block, so that a prompt matches only blocks of the same salt. A
client's own `cache_salt` divides its cache further and cannot select another client's cache.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Literal, TypeAlias

from kvroute.serve.api.api_keys import KeySettings

CacheSaltMode: TypeAlias = Literal["none", "per-key", "per-tenant"]


class CacheSalts:
    """Salts by the name of the client's key: HMAC-SHA256 with a secret, so that no salt reveals another one."""

    __slots__ = ("_owners", "_secret", "_without")

    def __init__(self, tenants: Mapping[str, str], secret: bytes) -> None:
        """
        Args:
            tenants: tenant by key; a key that is not listed has its own cache.
            secret: must be the same in all gateways of the same engines; otherwise each prompt is cached once per
                gateway.
        """
        self._owners = {key: f"tenant:{tenant}" for key, tenant in tenants.items()}
        self._secret = secret
        self._without: dict[str, str] = {}
        """Salts of clients that send no own salt, by key."""

    @classmethod
    def of(cls, mode: CacheSaltMode, keys: KeySettings, secret: bytes) -> CacheSalts | None:
        """Return the salts for the settings; None: clients' own salts are forwarded unchanged."""
        if mode == "none":
            return None
        return cls(keys.tenants if mode == "per-tenant" else {}, secret)

    def salt(self, key: str, own: str) -> str:
        """Return the salt of a request: 64 hexadecimal digits. `own` is the client's salt, empty if it sends none."""
        if not own and key in self._without:
            return self._without[key]
        owner = self._owners.get(key, f"key:{key}")
        # Names contain no NUL, so that different pairs of owner and own salt give different messages.
        salt = hmac.digest(self._secret, f"{owner}\0{own}".encode(), "sha256").hex()
        if not own:
            self._without[key] = salt
        return salt

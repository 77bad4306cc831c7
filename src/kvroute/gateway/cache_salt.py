"""Cache salts: keep the engines' prefix caches of API keys, or of tenants, apart. It reads and sends no request.

vLLM and SGLang hash `cache_salt` with a prompt's first block, so that a prompt finds only blocks of the same salt. What
a client sends as its own `cache_salt` divides its cache further, and never reaches that of another client.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Literal, TypeAlias

from kvroute.gateway.keys import KeySettings

CacheSaltMode: TypeAlias = Literal["none", "per-key", "per-tenant"]


class CacheSalts:
    """Salts by the name of the client's key. HMAC-SHA256 with a secret: no salt says anything of another one."""

    __slots__ = ("_owners", "_secret", "_without")

    def __init__(self, tenants: Mapping[str, str], secret: bytes) -> None:
        """
        Args:
            tenants: tenant by key; a key that is not listed has a cache of its own.
            secret: gateways in front of the same engines need the same one, or prompts are cached once for each.
        """
        self._owners = {key: f"tenant:{tenant}" for key, tenant in tenants.items()}
        self._secret = secret
        self._without: dict[str, str] = {}
        """Salts of clients that send none, by key."""

    @classmethod
    def of(cls, mode: CacheSaltMode, keys: KeySettings, secret: bytes) -> CacheSalts | None:
        """As the settings say; None: clients' own salts are passed on as they are."""
        if mode == "none":
            return None
        return cls(keys.tenants if mode == "per-tenant" else {}, secret)

    def salt(self, key: str, own: str) -> str:
        """The salt of a request: 64 hexadecimal digits. `own` is what the client sends, empty where it sends none."""
        if not own and key in self._without:
            return self._without[key]
        owner = self._owners.get(key, f"key:{key}")
        # Names hold no NUL, so that no two pairs of owner and own salt give the same message.
        salt = hmac.digest(self._secret, f"{owner}\0{own}".encode(), "sha256").hex()
        if not own:
            self._without[key] = salt
        return salt

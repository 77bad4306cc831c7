"""The connection to an API server: a kubeconfig or the service account of the own pod, by lightkube.

lightkube reads the configuration, checks certificates, and reads a rotated token again after a 401. Lists and watches
are kvroute's own (`informer`): lightkube's watch asks for no bookmarks, and ends a line at any Unicode separator.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import httpx2
import msgspec
import yaml
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError

from kvroute.types import InputError

_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach an API server; the files are read at each connection, so a rotated credential is used."""

    kubeconfig: Path | None = None
    """None: the service account of the own pod, else `KUBECONFIG`, else `~/.kube/config`."""
    context: str | None = None
    """None: the current context of the kubeconfig."""

    def namespace(self) -> str:
        """Return the namespace of the own pod or of the context.

        Raises:
            InputError: there is no usable configuration.
        """
        return self._config().namespace

    def connect(self) -> httpx2.AsyncClient:
        """Return a client for paths relative to the server's address; nothing is sent yet.

        Raises:
            InputError: there is no usable configuration.
        """
        config = self._config()
        try:
            return AsyncClient(config, ConnectionParams(timeout=httpx2.Timeout(_CONNECT_S)))
        except (ConfigError, OSError, ssl.SSLError, ValueError, httpx2.InvalidURL) as error:
            raise self._fault(str(error)) from None

    def _config(self) -> SingleConfig:
        try:
            config = KubeConfig.from_env() if self.kubeconfig is None else KubeConfig.from_file(self.kubeconfig)
            chosen = config.get(self.context)
        except (ConfigError, OSError, yaml.YAMLError, msgspec.ValidationError) as error:
            raise self._fault(str(error)) from None
        except (KeyError, TypeError, AttributeError):
            raise self._fault("it is not a complete kubeconfig") from None
        if chosen is None:
            raise self._fault("it has no current context")
        return chosen._replace(user=chosen.user or User())

    def _fault(self, why: str) -> InputError:
        where = str(self.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config")
        return InputError(" ".join(why.split()), where=where, hint="give a kubeconfig with --kubeconfig or KUBECONFIG")

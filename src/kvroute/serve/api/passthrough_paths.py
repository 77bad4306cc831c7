"""Paths of requests that one engine serves alone: the built-in ones, and those that the settings list.

A path that an engine's operator uses (to stop it, to clear its caches, to change its model) is only passed through if
the settings list exactly that path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

from kvroute.serve.api.requests import KINDS

READ = frozenset((b"GET", b"HEAD"))
_POST = frozenset((b"POST",))
_ALL = READ | {b"POST", b"PUT", b"PATCH", b"DELETE"}

OPENAI_COMPLETIONS = frozenset((b"/v1/completions", b"/v1/chat/completions"))
COMPLETIONS = frozenset(KINDS)
"""Paths of requests that the core routes; those of `BUILT_IN` among them are passed through to engines that cannot
split such requests."""
MODELS = b"/v1/models"
MODEL_PATH = b"/v1/models/"
OWN = frozenset((MODELS, b"/health", b"/ready", b"/metrics", b"/openapi.json"))
"""Pages that the gateway serves itself, beside the models under `MODEL_PATH`."""

_PLAIN = re.compile(r"[\w .:@+~/-]{1,500}")
_CONTROL = re.compile(
    r"(?:admin|emulator|debug|control|internal|fault_tolerance|collective_rpc|(?:get_)?server_info|.*weight.*"
    r"|sleep|wake(?:_?up)?|pause|resume|abort|drain|stop|shutdown|restart|reload|quit|kill|freeze_gc|slow_down"
    r"|(?:reset|flush|clear|update|load|unload|start|stop|abort|pause|resume|continue|release|set|init|finish|destroy"
    r"|shutdown|scale|configure|dump|open|close|register|unregister|delete|remove|add|drain|save|send|attach|detach"
    r"|enable|disable|begin|end|prepare)[_-].*)",
    re.IGNORECASE,
)
"""Segments of paths with which engines are controlled (vLLM's `/sleep`, SGLang's `/flush_cache`); wildcards never cover
a path that has one."""


@dataclass(frozen=True, slots=True)
class PassthroughEndpoint:
    """How requests for a path are passed through."""

    name: str
    """Its name in metrics and logs."""
    methods: frozenset[bytes] = _POST
    generates: bool = False
    """Whether the engine generates tokens, so that a response that is not streamed may take long."""
    json: bool = True
    """Whether every body must be a JSON object; otherwise its Content-Type says what it is."""
    salted: bool = True
    """Whether the engine keeps a prompt's KV cache, so that the gateway sets `cache_salt`."""


MODEL_LIST = PassthroughEndpoint("models", READ, json=False, salted=False)
"""Queries of models that an engine answers."""
ANY = PassthroughEndpoint("passthrough", _ALL, generates=True, json=False)
"""Requests that another proxy lets pass although no list has their path."""

_RESPONSES = PassthroughEndpoint("responses", generates=True)
_STORED_RESPONSE = PassthroughEndpoint("responses", READ | {b"POST", b"DELETE"}, generates=True, json=False)
"""Also of paths such as /v1/responses/input_tokens."""
_OF_STORED_RESPONSE = PassthroughEndpoint("responses", READ, generates=True, json=False)
_CANCEL = PassthroughEndpoint("responses", _POST, generates=True, json=False)
_MESSAGES = PassthroughEndpoint("messages", generates=True)
_RERANK, _SCORE = PassthroughEndpoint("rerank"), PassthroughEndpoint("score")
_AUDIO = PassthroughEndpoint("audio", generates=True, json=False)

BUILT_IN: dict[bytes, PassthroughEndpoint] = {
    b"/v1/responses": _RESPONSES,
    b"/v1/messages": _MESSAGES,
    b"/v1/messages/count_tokens": PassthroughEndpoint("count_tokens", salted=False),
    b"/v1/rerank": _RERANK,
    b"/v2/rerank": _RERANK,
    b"/rerank": _RERANK,
    b"/v1/score": _SCORE,
    b"/score": _SCORE,
    b"/v1/embeddings": PassthroughEndpoint("embeddings"),
    b"/pooling": PassthroughEndpoint("pooling"),
    b"/classify": PassthroughEndpoint("classify"),
    b"/tokenize": PassthroughEndpoint("tokenize", salted=False),
    b"/detokenize": PassthroughEndpoint("detokenize", salted=False),
}
_RESPONSES_PREFIX = b"/v1/responses/"
BUILT_IN_PREFIXES: dict[bytes, PassthroughEndpoint] = {_RESPONSES_PREFIX: _STORED_RESPONSE, b"/v1/audio/": _AUDIO}


@dataclass(frozen=True, slots=True)
class PathPattern:
    """Paths and methods of requests that an engine gets, for a proxy that cannot ask `PassthroughPaths`."""

    regex: str
    """Matches whole paths without their query, as RE2 and Python read it."""
    methods: frozenset[bytes]


class PassthroughPaths:
    """Finds the endpoint of a path."""

    def __init__(self, listed: Iterable[str]) -> None:
        """Args: `listed`: further paths, as in the settings; a `*` at the end stands for any rest of the path."""
        self._exact = dict(BUILT_IN)
        self._prefixes: list[tuple[bytes, PassthroughEndpoint]] = []
        for text in listed:
            endpoint = PassthroughEndpoint(text, _ALL, generates=True, json=False)
            if text.endswith("*"):
                self._prefixes.append((text[:-1].encode(), endpoint))
            else:
                self._exact.setdefault(text.encode(), endpoint)
        self._prefixes.sort(key=lambda prefix: (-len(prefix[0]), prefix[0]))

    def find(self, path: bytes) -> PassthroughEndpoint | None:
        """Return the endpoint of a path; None if it is not passed through. Of several prefixes the longest counts."""
        found = self._exact.get(path)
        if found is not None:
            return found
        for prefix, endpoint in BUILT_IN_PREFIXES.items():
            if path.startswith(prefix):
                rest = path[len(prefix) :]
                if prefix == _RESPONSES_PREFIX and b"/" in rest:
                    endpoint = _CANCEL if rest.endswith(b"/cancel") else _OF_STORED_RESPONSE
                return endpoint if is_plain(rest) else None
        if is_own(path):
            return None
        for prefix, endpoint in self._prefixes:
            if path.startswith(prefix):
                return endpoint if is_plain(path[1:]) and not controls_engine(path) else None
        return None

    def patterns(self) -> tuple[list[PathPattern], list[PathPattern]]:
        """Return the paths that engines get: all but wildcards, and wildcards, which do not cover `NOT_IN_WILDCARDS`.

        The patterns also match escapes that `find` refuses, and a GET of `/cancel`. The paths must be normalized: no
        empty or dot segments, and no escapes of characters that need none.
        """
        posts = {*COMPLETIONS, *(path for path, endpoint in BUILT_IN.items() if endpoint.methods == _POST)}
        exact = [PathPattern(_any_of(posts), _POST), PathPattern(_any_of([MODELS]), READ)]
        exact += [PathPattern(MODEL_PATH.decode() + _REST, READ)]
        stored = _RESPONSES_PREFIX.decode()
        exact += [
            PathPattern(stored + _SEGMENT, _STORED_RESPONSE.methods),
            PathPattern(f"{stored}{_REST}/cancel", _CANCEL.methods),
            PathPattern(f"{stored}{_SEGMENT}/{_REST}", _OF_STORED_RESPONSE.methods),
            PathPattern("/v1/audio/" + _REST, _AUDIO.methods),
        ]
        listed = [path for path in self._exact if path not in BUILT_IN]
        if listed:
            exact.append(PathPattern(_any_of(listed), _ALL))
        return exact, [PathPattern(_beginning(prefix.decode()), _ALL) for prefix, _ in self._prefixes]


_CHAR = "(?:[A-Za-z0-9_.:@+~-]|%[0-9A-Fa-f]{2})"
_SEGMENT = _CHAR + "+"
_REST = f"{_SEGMENT}(?:/{_SEGMENT})*"


def _any_of(paths: Iterable[bytes]) -> str:
    return "|".join(re.escape(path.decode()) for path in sorted(paths))


def _beginning(prefix: str) -> str:
    """Return what matches a wildcard. Args: `prefix`: before its `*`."""
    return re.escape(prefix) + (_REST if prefix.endswith("/") else f"{_CHAR}*(?:/{_SEGMENT})*")


NOT_IN_WILDCARDS = (
    _any_of([*COMPLETIONS, *OWN, *BUILT_IN])
    + "|(?:"
    + _any_of([MODEL_PATH, *BUILT_IN_PREFIXES])
    + r").*|(?i:(?:/[^/]*)*/(?:%20)*"
    + _CONTROL.pattern.replace(".*", "[^/]*")
    + r"(?:%20)*(?:/.*)?)"
)
"""Regular expression, as RE2 and Python read it, of paths that no wildcard covers."""


def passthrough_fault(listed: str) -> tuple[str, str]:
    """Return what is wrong with a path of the settings, and how to fix it; empty texts: nothing."""
    path = listed.encode()
    if is_own(path):
        return f"{listed} is served by the gateway itself", "leave it out"
    if path in BUILT_IN or any(path.startswith(prefix) for prefix in BUILT_IN_PREFIXES):
        return f"{listed} is passed through anyway", "leave it out"
    if any(part and not part.strip(".") for part in listed.split("/")):
        return f"{listed} has a segment of dots", "write the path without `.` and `..`"
    if listed.endswith("*") and controls_engine(path.removesuffix(b"*").rstrip(b"/")):
        return f"{listed} is a wildcard for paths that control engines", "list each path without `*`"
    return "", ""


def is_own(path: bytes) -> bool:
    """Whether the gateway serves the path itself."""
    return path in COMPLETIONS or path in OWN or path.startswith(MODEL_PATH)


def is_plain(text: bytes) -> bool:
    """Whether the rest of a path, percent-encoded, is plain: after one decoding it holds no further escape, no
    parameter, and no empty or dotted segment."""
    try:
        name = unquote(text.decode("ascii"), errors="strict")
    except UnicodeDecodeError:
        return False
    return _PLAIN.fullmatch(name) is not None and all(part.strip(".") for part in name.split("/"))


def controls_engine(path: bytes) -> bool:
    """Whether some segment of a path, percent-encoded, may change or stop an engine."""
    segments = unquote(path.decode("latin-1")).split("/")
    return any(_CONTROL.fullmatch(segment.strip()) is not None for segment in segments)

"""Recorded requests and answers of a real API server: reading, and comparison with placeholders unified."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "kubernetes_transcripts"
PLACEHOLDER = re.compile(
    r"<(uid\d+|rv\d+|rv\?|time|microtime|rand|age|hash|etag|port|caBundle|other|token|jwt|\d+ omitted|"
    r"continue \{.*?\}|continue)>"
)
PATTERNS: Mapping[str, str] = {
    "uid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "rv": r"\d+", "rv?": r"\d+",
    "time": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "microtime": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z",
    "rand": r"[a-z0-9]+", "age": r"[\dsmhd]+", "hash": r"[0-9A-Za-z]+", "etag": r'"[0-9A-F]+"', "port": r"\d+",
    "caBundle": r"[A-Za-z0-9+/=]+", "token": r".+", "jwt": r".+",
}  # fmt: skip
HEADERS = ("warning", "retry-after", "www-authenticate", "content-encoding", "location", "allow")
"""Headers that an answer has if and only if the recording has them."""


class Mismatch(Exception):
    """An answer that is not the recorded one; the text says where and how."""


@dataclass(frozen=True, slots=True)
class Case:
    """One recorded line."""

    name: str
    request: Mapping[str, Any] | None
    response: Mapping[str, Any]
    fact: Any = None

    @property
    def watch(self) -> bool:
        """Return whether the answer is a stream of events."""
        return "events" in self.response


def read(name: str) -> list[Case]:
    """Return the cases of a file, in the order of recording."""
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [Case(line["case"], line.get("request"), line.get("response", {}), line.get("fact")) for line in found]


def files() -> list[str]:
    """Return the names of the recorded files."""
    return sorted(path.stem for path in FOLDER.glob("*.jsonl"))


@dataclass(slots=True)
class Bindings:
    """What placeholders stand for. A number of `uid` or `rv` stands for one value, and no other number for the same."""

    values: dict[str, str] = field(default_factory=dict)
    recent: dict[str, str] = field(default_factory=dict)
    """The last value of each placeholder without a number."""
    _names: dict[str, str] = field(default_factory=dict)

    def bind(self, name: str, value: str) -> None:
        """Remember what a placeholder stands for; raise Mismatch for a second value, or a second name."""
        if not re.fullmatch(r"(uid|rv)\d+", name):
            self.recent[name] = value
            return
        held = self.values.setdefault(name, value)
        if held != value:
            raise Mismatch(f"<{name}> is {held}, not {value}")
        other = self._names.setdefault(f"{name[:2]}:{value}", name)
        if other != name:
            raise Mismatch(f"<{name}> and <{other}> are both {value}")

    def copy(self) -> Bindings:
        """Return a copy, to undo the bindings of a case that does not match."""
        return Bindings(dict(self.values), dict(self.recent), dict(self._names))

    def compare(self, wanted: Any, found: Any, path: str = "") -> None:
        """Raise Mismatch unless a found value is the recorded one."""
        if isinstance(wanted, str):
            self._compare_text(wanted, found, path)
        elif isinstance(wanted, dict):
            if not isinstance(found, dict):
                raise Mismatch(f"{path or 'body'}: {found!r} is no object")
            for name in wanted.keys() ^ found.keys():
                where = "not in the answer" if name in wanted else f"not recorded: {found[name]!r}"
                raise Mismatch(f"{path}.{name}: {where}")
            for name, part in wanted.items():
                self.compare(part, found[name], f"{path}.{name}")
        elif isinstance(wanted, list):
            if not isinstance(found, list) or len(found) != len(wanted):
                raise Mismatch(f"{path}: {json.dumps(found)[:400]} instead of {json.dumps(wanted)[:400]}")
            for at, (part, other) in enumerate(zip(wanted, found, strict=True)):
                self.compare(part, other, f"{path}[{at}]")
        elif wanted != found or isinstance(wanted, bool) != isinstance(found, bool):
            raise Mismatch(f"{path}: {found!r} instead of {wanted!r}")

    def _compare_text(self, wanted: str, found: Any, path: str) -> None:
        if omitted := re.fullmatch(r"<(\d+) omitted>", wanted):
            count = len(found) if isinstance(found, list) else -1
            if count != int(omitted[1]):
                raise Mismatch(f"{path}: {count} entries instead of {omitted[1]}: {json.dumps(found)[:600]}")
            return
        if wanted.startswith("<continue {") and wanted.endswith("}>"):
            self._compare_token(wanted, found, path)
            return
        if not isinstance(found, str):
            raise Mismatch(f"{path}: {found!r} instead of {wanted!r}")
        pattern, names = self._pattern(wanted)
        matched = re.fullmatch(pattern, found, re.DOTALL)
        if matched is None:
            raise Mismatch(f"{path}: {found!r} instead of {wanted!r}")
        for name, value in zip(names, matched.groups(), strict=True):
            self.bind(name, value)

    def _compare_token(self, wanted: str, found: Any, path: str) -> None:
        recorded = json.loads(wanted.removeprefix("<continue ").removesuffix(">"))
        text = str(found)
        token = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        if isinstance(recorded["rv"], str):
            token["rv"] = str(token["rv"])
        self.compare(recorded, token, path)

    def _pattern(self, wanted: str) -> tuple[str, list[str]]:
        """Return a regular expression for a recorded text, and the placeholders of its groups."""
        pattern, names, at = "", [], 0
        for found in PLACEHOLDER.finditer(wanted):
            pattern += re.escape(wanted[at : found.start()])
            name = found[1]
            kind = re.sub(r"\d+$", "", name)
            if name in self.values:
                pattern += re.escape(self.values[name])
            elif kind in PATTERNS:
                pattern += f"({PATTERNS[kind]})"
                names.append(name)
            else:
                pattern += re.escape(found[0])
            at = found.end()
        return pattern + re.escape(wanted[at:]), names

    def fill(self, text: str, fresh: Mapping[str, str]) -> str:
        """Return a recorded text of a request with values; `fresh` has those that no answer has given."""

        def value(found: re.Match[str]) -> str:
            name = found[1]
            if name.startswith("continue {"):
                token = json.loads(self.fill(name.removeprefix("continue ").replace("\\\\", "\\"), fresh))
                token["rv"] = int(token["rv"])
                packed = json.dumps(token, separators=(",", ":")).encode()
                return base64.urlsafe_b64encode(packed).decode().rstrip("=")
            if name in self.values:
                return self.values[name]
            if name in fresh:
                if re.fullmatch(r"(uid|rv)\d+", name):
                    self.bind(name, fresh[name])
                return fresh[name]
            made = self._invent(name)
            return made if made else found[0]

        return PLACEHOLDER.sub(value, text)

    def _invent(self, name: str) -> str:
        """Return a value for a number that only requests have: a version or uid that nothing has."""
        if name.startswith("rv") and name[2:].isdigit():
            value = str(next(number for number in range(1, 99) if f"rv:{number}" not in self._names))
        elif name.startswith("uid"):
            value = f"00000000-0000-4000-8000-{int(name[3:]):012d}"
        else:
            if name in self.recent:
                return self.recent[name]
            return {"time": "2026-01-01T00:00:00Z", "microtime": "2026-01-01T00:00:00.000000Z", "rand": "r4nd0"}.get(
                name, ""
            )
        self.bind(name, value)
        return value


def unordered(body: Any) -> Any:
    """Return a Status with its causes in a fixed order, and its message without their order.

    The API server validates custom resources in the random order of Go's maps.
    """
    causes = (body.get("details") or {}).get("causes") if isinstance(body, dict) else None
    if not causes or len(causes) < 2 or body.get("reason") != "Invalid":
        return body
    ordered = sorted(causes, key=lambda cause: (cause.get("field", ""), cause.get("message", "")))
    texts = sorted({f"{cause.get('field', '')}: {cause.get('message', '')}" for cause in causes})
    head, found, _ = str(body["message"]).partition(" is invalid: [")
    message = head + found + ", ".join(texts) + "]" if found else body["message"]
    return {**body, "message": message, "details": {**body["details"], "causes": ordered}}

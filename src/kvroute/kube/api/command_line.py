"""Command lines of engines in container manifests: which engine a container starts, and with which options.

Shell scripts are read as far as a manifest allows: `$(NAME)` and `$NAME` get the values that the manifest has, and a
value that stays unknown keeps its `$`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import msgspec

from kvroute.kube.api.objects import Container

EngineKind = Literal["vllm", "sglang", "dynamo"]

_MODULES: Mapping[str, EngineKind] = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.cli.main": "vllm",
    "sglang.launch_server": "sglang",
    "dynamo.vllm": "dynamo",
    "dynamo.sglang": "dynamo",
    "dynamo.trtllm": "dynamo",
}
_SUBCOMMANDS: Mapping[tuple[str, str], EngineKind] = {("vllm", "serve"): "vllm", ("sglang", "serve"): "sglang"}
_IMAGES: Mapping[str, EngineKind] = {"vllm/vllm-openai": "vllm"}
"""Images whose entry point is the engine, so that `args` alone are its options."""
_SHELLS = frozenset(("sh", "bash", "dash", "zsh"))
_SEPARATORS = frozenset("();<>|&\n")
_SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
_KUBERNETES_VARIABLE = re.compile(r"\$\$|\$\(([A-Za-z_][\w.-]*)\)")
_SUBSTITUTION = re.compile(r"\$\(\([^()]*\)\)|\$\([^()]*\)")
"""Arithmetic or a command of the shell, or a variable that only the kubelet knows: its value is not known."""
_SHELL_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """The engine of a container, with its options by their long names; a flag without a value has the value ""."""

    kind: EngineKind
    options: Mapping[str, str]
    model: str = ""
    """Positional argument of `vllm serve`."""

    def first(self, *names: str) -> str:
        """Return the value of the first option that is given; empty if none is or its value is not known."""
        found = next((self.options[name] for name in names if name in self.options), "")
        return "" if "$" in found else found

    def number(self, *names: str) -> int | None:
        """Return the value of the first option that is given as a number; None if none is, or it is no number."""
        text = self.first(*names)
        return int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else None

    def has(self, *names: str) -> bool:
        """Return whether one of the options is given."""
        return any(name in self.options for name in names)

    def mapping(self, name: str) -> dict[str, object] | None:
        """Return an option that holds a JSON object, with its dotted form (`--kv-transfer-config.kv_role`).

        None if it is not given or its value is no JSON object.
        """
        merged: dict[str, object] = {}
        if name in self.options:
            try:
                decoded = msgspec.json.decode(self.options[name])
            except (msgspec.DecodeError, UnicodeError):
                return None
            if not isinstance(decoded, dict):
                return None
            merged.update(decoded)
        dotted = {
            key.removeprefix(f"{name}."): value for key, value in self.options.items() if key.startswith(f"{name}.")
        }
        merged.update(dotted)
        return merged if dotted or name in self.options else None


def engine_command(container: Container) -> EngineCommand | None:
    """Return the engine that a container starts; None if it starts none that is known."""
    values = {variable.name: variable.value for variable in container.env or [] if variable.value}
    command = [_expanded(word, values) for word in container.command or []]
    args = [_expanded(word, values) for word in container.args or []]
    words = [*command, *args]
    script = _script(words)
    for statement in [words] if script is None else _statements(script, values):
        found = _engine(statement)
        if found is not None:
            return found
    image = container.image.partition("@")[0]
    kind = next((kind for name, kind in _IMAGES.items() if re.search(rf"(^|/){name}(:|$)", image)), None)
    if kind is None or command:
        return None
    return _parsed(kind, args[1:] if args[:1] == ["serve"] else args)


def _expanded(word: str, values: Mapping[str, str]) -> str:
    """Expand `$(NAME)` as the kubelet does: an unknown name stays, and `$$` is one dollar sign."""
    return _KUBERNETES_VARIABLE.sub(lambda match: "$" if match[0] == "$$" else values.get(match[1], match[0]), word)


def _script(words: Sequence[str]) -> str | None:
    """Return the script of `sh -c SCRIPT`; None if the words are no such command."""
    if not words or words[0].rpartition("/")[2] not in _SHELLS:
        return None
    for index, word in enumerate(words[1:], start=1):
        if word.startswith("-") and not word.startswith("--") and word.endswith("c"):
            return words[index + 1] if index + 1 < len(words) else None
    return None


def _statements(script: str, values: Mapping[str, str]) -> list[list[str]]:
    """Return the words of each simple command of a script; those before a syntax error if there is one."""
    script = _SUBSTITUTION.sub("${_}", script.replace("\\\n", " "))
    lexer = shlex.shlex(script, posix=True, punctuation_chars="".join(_SEPARATORS))
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    statements: list[list[str]] = [[]]
    comment = False
    try:
        for word in lexer:
            if word and set(word) <= _SEPARATORS:
                comment = comment and "\n" not in word
                statements.append([])
            elif not comment:
                comment = word.startswith("#")
                if not comment:
                    statements[-1].append(_shell_expanded(word, values))
    except ValueError:
        pass  # an unclosed quotation
    return statements


def _shell_expanded(word: str, values: Mapping[str, str]) -> str:
    return _SHELL_VARIABLE.sub(lambda match: values.get(match[1] or match[2], match[0]), word)


def _engine(words: Sequence[str]) -> EngineCommand | None:
    for index, (word, following) in enumerate(pairwise(words)):
        kind = _MODULES.get(following) if word == "-m" else _SUBCOMMANDS.get((word.rpartition("/")[2], following))
        if kind is not None:
            rest = words[index + 2 :]
            return _parsed(kind, rest[1:] if word == "-m" and rest[:1] == ["serve"] else rest)
    return None


def _parsed(kind: EngineKind, words: Sequence[str]) -> EngineCommand:
    options: dict[str, str] = {}
    model = words[0] if words and not words[0].startswith("-") and "$" not in words[0] else ""
    name = ""
    for word in words:
        if _is_option(word):
            name, equals, value = word.partition("=")
            name = _long(name)
            options[name] = value
            name = "" if equals else name
        elif name:
            options[name] = word
            name = ""
    return EngineCommand(kind, options, model)


def _is_option(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not word[1].isdigit()


def _long(name: str) -> str:
    """Return the long name with hyphens; the part after a dot, a key of a JSON option, keeps its underscores."""
    head, dot, key = _SHORT.get(name, name).partition(".")
    return head.replace("_", "-") + dot + key

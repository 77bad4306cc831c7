"""The `gateway` section: documented defaults, the line of each error, its fix in the message, all errors at once."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.serve.config.settings_rig import ENVIRON, FULL, LIVE, ROOT, section, section_errors

from kvroute.serve.api.api_keys import hash_text
from kvroute.serve.config.field_types import Wait
from kvroute.serve.config.preflight import deployment_of, settings_of
from kvroute.serve.config.settings import GatewaySettings
from kvroute.topology.schema import ClusterFile
from kvroute.types import InputError, InputErrors
from kvroute_engine.files.document import read_section
from kvroute_engine.files.units import quantity

DOCUMENTED, TOKENIZED, KEYED, QUERIED = re.findall(
    r"```yaml\n(gateway:\n.*?)```", (ROOT / "docs" / "cluster-file.md").read_text(encoding="utf-8"), re.S
)


def test_the_documented_defaults_are_the_defaults() -> None:
    assert settings_of(DOCUMENTED, "f") == GatewaySettings() == settings_of("name: a\n", "f")
    keys = re.findall(r"^  (\w+):", DOCUMENTED, re.M)
    assert set(keys) | {
        "reserve",
        "upstream_key_env",
        "cache_salt_secret_env",
        "fair_queue",
        "offload",
        "autoscaling",
        "replication",
        "session_affinity",
    } == {field.encode_name for field in msgspec.structs.fields(GatewaySettings)}


def test_the_documented_examples_are_read(tmp_path: Path) -> None:
    (tmp_path / "gateway.keys").write_text(f"alice: {hash_text('a')}\n", encoding="utf-8")
    keyed = settings_of(KEYED, str(tmp_path / "cluster.yaml"), ENVIRON)
    assert keyed.keys.file == str(tmp_path / "gateway.keys")
    prompt = settings_of(TOKENIZED, "/a/f", None).prompt
    assert (prompt.tokenizers, prompt.without_tokenizer) == ({"llama-3-70b": "/a/models/llama"}, "engine")
    oracle = settings_of(QUERIED, "f").oracle
    assert oracle.prometheus is not None
    assert oracle.prometheus.per_tier is not None
    assert oracle.prometheus.per_tier["rack"] == 'max(uplink_utilisation{level="rack"})'


def test_every_field_of_a_full_section_is_read() -> None:
    read = settings_of(FULL, "f", ENVIRON)
    assert [float(value) for value in (read.limits.body_bytes, read.timeouts.connect_s)] == [2.0**20, 1e-3]
    assert read.admin.hosts == ["gateway.example"]
    spec = read.control_spec()
    assert (spec.decode, spec.parameters, spec.prefill) == (
        "cla",
        {"cache_weight": 2, "load_weight": 0.5},
        "least-loaded",
    )
    assert (spec.constraint, spec.reserve_bytes, spec.slow_start_s) == ("pod:preferred:0.5", 2e9, 0.0)
    oracle = spec.oracle
    assert (oracle.stale_after_s, oracle.self_measured, oracle.prediction) == (60.0, False, "trend")


@pytest.mark.parametrize(
    ("written", "number"),
    [("19400", 19_400.0), ("19.4K tokens", 19_400.0), ("19.4K", 19_400.0), ("2M", 2e6), ("512 tokens", 512.0)],
)
def test_thresholds_are_numbers_or_text_with_a_unit(written: str, number: float) -> None:
    read = settings_of(f"gateway: {{offload: {{short_term: {{threshold_max: {written}, threshold_min: 1}}}}}}", "f")
    assert read.offload is not None
    assert read.offload.spec().short_term.threshold_max_tokens == number


def test_a_core_can_be_built_from_the_defaults() -> None:
    cluster, read = deployment_of(LIVE, "f")
    assert read.control_spec().build(cluster).handle is not None
    assert read.control_spec().oracle.self_measured


TOKEN = re.compile(r"(?<=[{\[ ])(?:\"[^\"]*\"|[^\s{}\[\],:\"]+(?: [a-zA-Z]+)?)(?=[,}\]\n])")
KEY = re.compile(r"(?<=[{ ])[a-z_]+(?=:(?: |$))", re.M)


@st.composite
def corrupted(draw: st.DrawFn) -> tuple[str, int]:
    """Draw a full section with one key or value replaced by an invalid one, and its line."""
    if draw(st.booleans()):
        start, end = draw(
            st.sampled_from([m.span() for m in KEY.finditer(FULL) if m[0] not in ("alice", "llama", "sql")])
        )
        new = draw(st.sampled_from(["kye", "Listen", "no-such-key"]))
    else:
        start, end = draw(st.sampled_from([match.span() for match in TOKEN.finditer(FULL)]))
        new = draw(st.sampled_from(["[1, {a: b}]", "{}", "-7", ".inf", ".nan", '"\\n"', "!!binary x", "*a", ""]))
        if new == "" and FULL[end] not in ",}\n":
            new = "{}"
    return FULL[:start] + new + FULL[end:], FULL.count("\n", 0, start) + 1


@given(corrupted())
@settings(max_examples=150, deadline=None)
def test_every_corruption_is_reported_on_its_line(drawn: tuple[str, int]) -> None:
    text, line = drawn
    problems = section_errors(text)
    assert line in [problem.line for problem in problems], [str(problem) for problem in problems]
    assert all(problem.what and problem.field.startswith("gateway") for problem in problems)
    assert [problem.line for problem in problems] == sorted(problem.line for problem in problems)


PROMETHEUS = "source: prometheus, prometheus: {url: 'http://p'"
SECTION_ERRORS = {
    "unknown key": ("lisen: {}", "lisen", "did you mean 'listen'?"),
    "unknown inner key": ("limits: {boddy: 1 MB}", "limits.boddy", "did you mean 'body'?"),
    "no unit": ("timeouts: {connect: 2}", "timeouts.connect", "it has no unit; write a number and one of ns"),
    "no wait": ("timeouts: {connect: 0 s}", "timeouts.connect", "between 1 ms and 24 h"),
    "slow start": ("health: {slow_start: 25 h}", "health.slow_start", "between 0 s and 24 h"),
    "for ever": ("timeouts: {drain: 25 h}", "timeouts.drain", "between 1 ms and 24 h"),
    "no size": ("limits: {body: 64}", "limits.body", "it has no unit"),
    "port": ("listen: {port: 65536}", "listen.port", "a whole number from 0 to 65535"),
    "same port": ("listen: {port: 9090}", "", "both use port 9090"),
    "host": ("listen: {host: 'http://a'}", "listen.host", "such as '127.0.0.1'"),
    "yes or no": ("oracle: {self_measured: 1}", "oracle.self_measured", "write true or false"),
    "choice": ("measure: ttft", "measure", "one of auto, first-byte, engine"),
    "share": ("retries: {share: 1.5}", "retries.share", "a number from 0 to 1"),
    "path": ("health: {path: health}", "health.path", "such as '/health'"),
    "policy": ("policy: netkw", "policy", "did you mean 'netkv'?"),
    "shadow": ("shadow: foresigth", "shadow", "did you mean 'foresight'?"),
    "parameter": ("parameters: {speed: 1}", "parameters", "'foresight-joint' has no parameter 'speed'; it takes"),
    "bad parameter": ("{policy: cla, parameters: {load_weight: -1}}", "parameters", "use 0 or more"),
    "bad weight": ("parameters: {aggregated: 3}", "parameters.aggregated", "3.0 is not 0, 1 or 2"),
    "prefill": ("prefill: cla", "prefill", "known: round-robin, least-loaded, cache-aware"),
    "constraint": ("constraint: pot:fail", "constraint", "'pot'"),
    "prediction": ("oracle: {prediction: best}", "oracle.prediction", "smooth, trend"),
    "no server": ("oracle: {source: prometheus}", "oracle", "add `prometheus: {url: ...}`"),
    "idle server": ("oracle: {prometheus: {url: 'http://p'}}", "oracle.prometheus", "not used with `source: static`"),
    "no query": (f"oracle: {{{PROMETHEUS}}}}}", "oracle.prometheus", "no query is given"),
    "both queries": (
        f"oracle: {{{PROMETHEUS}, per_tier: {{rack: a}}, per_link: {{query: b}}}}}}",
        "oracle.prometheus", "both `per_tier` and",
    ),
    "tier": (f"oracle: {{{PROMETHEUS}, per_tier: {{rak: a}}}}}}", "oracle.prometheus.per_tier.rak", "node, rack, pod"),
    "no tokenizer": ("prompt: {tokenizer: /no/where}", "prompt.tokenizer", "there is no tokenizer at /no/where"),
    "no tokenizer of a model": (
        "prompt: {tokenizers: {llama: /no/where}}", "prompt.tokenizers.llama", "there is no tokenizer at /no/where",
    ),
    "no engine to ask": (
        "prompt: {tokenizer: /, without_tokenizer: engine}", "prompt.without_tokenizer", "leave `tokenizer` out, or",
    ),
    "what without a tokenizer": ("prompt: {without_tokenizer: none}", "prompt.without_tokenizer", "text, engine"),
    "session without a bonus": ("session_affinity: {bonus: 0 s}", "session_affinity.bonus", "between 1 ms and 24 h"),
    "session's header": ("session_affinity: {header: 'a b'}", "session_affinity.header", "such as 'X-Tenant'"),
    "no folder": ("log: {events: /no/where/log}", "log.events", "there is no folder /no/where"),
    "no certificate": ("listen: {tls: {certificate: /no, key: /no}}", "listen.tls.key", "there is no file /no"),
    "no key file": ("keys: {file: /no/keys}", "keys.file", "cannot be read"),
    "unknown client": (
        f"keys: {{known: {{alice: '{hash_text('a')}'}}, concurrency: {{alise: 1}}}}",
        "keys.concurrency.alise", "did you mean 'alice'?",
    ),
    "limit without keys": ("keys: {concurrency: {alice: 1}}", "keys.concurrency.alice", "there are no keys"),
    "salts without keys": ("cache_salt: per-key", "cache_salt", "add `keys`, or write `cache_salt: none`"),
    "salts without tenants": (
        f"{{keys: {{known: {{a: '{hash_text('a')}'}}}}, cache_salt: per-tenant}}",
        "cache_salt", "no key has a tenant",
    ),
    "unknown key of a tenant": (
        f"keys: {{known: {{alice: '{hash_text('a')}'}}, tenants: {{alise: acme}}}}",
        "keys.tenants.alise", "did you mean 'alice'?",
    ),
    "salts' secret unset": (
        f"{{keys: {{known: {{a: '{hash_text('a')}'}}}}, cache_salt: per-key, cache_salt_secret_env: NONE}}",
        "cache_salt_secret_env", "export NONE=",
    ),
    "salts' secret for nothing": ("cache_salt_secret_env: NONE", "cache_salt_secret_env", "not used with"),
    "little memory": ("prompt: {memory: 1 MB}", "prompt.memory", "100 MB or more"),
    "no context": ("prompt: {context: 0}", "prompt.context", "whole number from 1"),
    "small files of a log": ("log: {file_size: 1 KB}", "log.file_size", "between 1 MB and 1000 TB"),
    "log of one file": ("log: {file_size: 1 GB, total_size: 1.5 GB}", "log.total_size", "2 GB or more"),
    "engines' key for all": ("upstream_key_env: ENGINE_KEY", "upstream_key_env", "all clients would use the"),
    "engines' key unset": (
        f"{{keys: {{known: {{a: '{hash_text('a')}'}}}}, upstream_key_env: NONE}}", "upstream_key_env", "export NONE=",
    ),
    "engines' key with a line's end": (
        f"{{keys: {{known: {{a: '{hash_text('a')}'}}}}, upstream_key_env: WITH_NEWLINE}}",
        "upstream_key_env", "a character that is not valid in a key",
    ),
    "name of a model with a line's end": ('models: {"llama\\n": llama-3-70b}', "models.llama", "does not fit"),
    "adapter without a load time": ("adapters: {sql: {load: 2}}", "adapters.sql.load", "it has no unit"),
    "not a mapping": ("[listen]", "", "['listen'] is not a mapping"),
    "no value": ("policy:", "policy", "has no value"),
}  # fmt: skip


def patterns(kind: msgspec.inspect.Type) -> Iterator[tuple[str, str]]:
    """Yield every pattern of text in a type, with a text that matches it."""
    seen: set[int] = set()
    rest: list[object] = [kind]
    while rest:
        part = rest.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, msgspec.inspect.Metadata) and isinstance(part.type, msgspec.inspect.StrType):
            if part.type.pattern:
                yield part.type.pattern, str((part.extra_json_schema or {}).get("examples", ["a"])[0])
        elif isinstance(part, msgspec.inspect.StrType):
            if part.pattern:
                yield part.pattern, "a"
        elif isinstance(part, list | tuple):
            rest += part
        elif isinstance(part, msgspec.Struct):
            rest += [getattr(part, name) for name in part.__struct_fields__]


MULTILINE = {r"\S"}
"""Queries in PromQL may have several lines."""
FITTING = {r"^sha256:[0-9a-f]{64}\Z": hash_text("a"), r"^[!-~]{16,1000}\Z": "0123456789abcdefg"}
"""Matching texts for the patterns whose example is a description."""


def test_no_text_of_a_cluster_file_ends_in_a_newline() -> None:
    """`$` matches before a final newline and `\\Z` does not; these texts become headers, file names and labels."""
    kinds = [msgspec.inspect.type_info(kind) for kind in (ClusterFile, GatewaySettings)]
    examples = {pair for kind in kinds for pair in patterns(kind) if pair[0] not in MULTILINE}
    assert len(examples) >= 8
    for pattern, example in examples:
        fitting = FITTING.get(pattern, example)
        assert re.search(pattern, fitting), (pattern, fitting)
        assert not re.search(pattern, fitting + "\n"), pattern


@pytest.mark.parametrize("fault", SECTION_ERRORS)
def test_each_error_gives_its_line_and_a_fix(fault: str) -> None:
    text, field, sentence = SECTION_ERRORS[fault]
    errors = {(problem.field, str(problem)) for problem in section_errors(section(text))}
    place = f"gateway.{field}" if field else "gateway"
    assert any(problem_field.startswith(place) and sentence in message for problem_field, message in errors), errors


@pytest.mark.parametrize("text", ["admin: {push_token: short-secret}", "keys: {known: {alice: kvr_short-secret}}"])
def test_error_messages_contain_no_secret(text: str) -> None:
    (problem,) = section_errors(section(text))
    assert "short-secret" not in str(problem)
    assert "the value does not fit" in str(problem)


def test_all_errors_are_reported_at_once_with_their_lines() -> None:
    lines = [
        "gateway:",
        "policy: a",
        "prefill: b",
        "constraint: c",
        "prompt: {tokenizer: d}",
        "oracle: {source: push, a: 1}",
    ]
    text = "\n  ".join(lines)
    assert [problem.line for problem in section_errors(text)] == [2, 3, 4, 5, 6]
    text = text.replace(", a: 1", ", prometheus: {url: 'http://p'}")
    assert [problem.line for problem in section_errors(text)] == [2, 3, 4, 5, 6, 6]


WRONG = [
    "policy: none-such",
    "shadow: none-such",
    "prefill: none-such",
    "constraint: none-such",
    "prompt: {tokenizer: nowhere}",
    "oracle: {source: prometheus}",
    "limits: {body: 3}",
    "timeouts: {prefil: 3 s}",
    "retries: {attempts: none}",
    "keys: {concurrency: {bob: 1}}",
    "log: {events: /nowhere/at/all}",
    "none_such: 3",
    "tracing: []",
]
"""Parts of a section, each with one error in form or meaning."""


@given(st.lists(st.sampled_from(WRONG), unique=True, min_size=1))
def test_no_error_hides_another(parts: list[str]) -> None:
    text = "\n  ".join(["gateway:", *parts])
    assert [problem.line for problem in section_errors(text)] == list(range(2, 2 + len(parts)))


def test_errors_in_other_sections_do_not_affect_the_gateway_section() -> None:
    """The line numbers are those of the file; errors of other sections are not reported."""
    text = "nodes: *none\nname: 7\ngateway:\n  policy: cla\n"
    value, lines = read_section(text, "f", "gateway", GatewaySettings)
    assert (value.policy, lines.error("x", ("gateway", "policy")).line) == ("cla", 4)
    with pytest.raises(InputErrors, match="f:3: gateway: 'gateway' has no value"):
        read_section("a: 1\n\ngateway:\n", "f", "gateway", GatewaySettings)
    with pytest.raises(InputErrors, match="not YAML"):
        read_section("a: [\n", "f", "gateway", GatewaySettings)


def test_a_wait_of_exactly_one_millisecond_is_accepted() -> None:
    assert quantity(Wait, "1 ms") == 1e-3
    with pytest.raises(InputError, match="between 1 ms and 24 h"):
        quantity(Wait, "0.9 ms")


@pytest.mark.parametrize(
    ("policy", "prefill", "reported"),
    [
        ("foresight-joint", "least-loaded", True),
        ("foresight-joint", "cache-aware", False),
        ("foresight", "least-loaded", False),
    ],
)
def test_a_prefill_policy_that_is_not_used_is_reported(policy: str, prefill: str, reported: bool) -> None:
    assert bool(GatewaySettings(policy=policy, prefill=prefill).remarks) is reported


NUMBERS = ["1e9", "1E9", "+2e3", "1e+3", "25e-2", ".5e1", "1.5e0", "2.e2"]


@pytest.mark.parametrize("written", NUMBERS)
def test_a_number_with_an_exponent_is_a_number(written: str) -> None:
    """As in YAML 1.2; where text is allowed, the same characters are text, and in quotes they are text everywhere."""
    read = settings_of(section(f"{{parameters: {{answer_transfers: {written}}}, models: {{a: {written}}}}}"), "f")
    assert read.parameters == {"answer_transfers": float(written)}
    assert read.models == {"a": written}
    (quoted,) = section_errors(section(f"{{parameters: {{answer_transfers: '{written}'}}}}"))
    assert f"'{written}' does not fit; write" in str(quoted)


def test_a_whole_number_may_have_an_exponent() -> None:
    read = settings_of(section("{limits: {in_flight: 2e3}, offload: {threshold: 1.94e4}, retries: {share: 2e-1}}"), "f")
    assert (read.limits.in_flight, read.retries.share) == (2_000, 0.2)
    assert read.offload is not None
    assert read.offload.threshold == 19_400
    (wrong,) = section_errors(section("{limits: {in_flight: 15e-1}}"))
    assert "1.5 does not fit; write a whole number" in str(wrong)


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_every_section_in_the_pages_is_read(page: str) -> None:
    """Blocks and lines of the pages that show a `gateway` section are valid, on another machine."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```ya?ml\n(.*?)^ *```", text, re.S | re.M) + re.findall(r"(?:^ {4,}.*\n)+", text, re.M)
    for block in (*map(textwrap.dedent, blocks), *re.findall(r"`(gateway: ?\{.*?\})`", text)):
        if re.search(r"^gateway:", block, re.M):
            settings_of(block, page, None)

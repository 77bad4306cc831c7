"""The `gateway` section: documented defaults, the line of each error, its fix in the message, all errors at once."""

from __future__ import annotations

import re
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.gateway.config.field_types import Wait
from kvroute.gateway.config.offload import OffloadSection, RoleSwitchSection
from kvroute.gateway.config.preflight import deployment_of, settings_of, tls_context
from kvroute.gateway.config.settings import GatewaySettings, TlsSettings
from kvroute.gateway.openai_api.api_keys import hash_text
from kvroute.policies.allocation import LongTerm
from kvroute.policies.offload import OffloadSpec
from kvroute.policies.threshold import ShortTerm
from kvroute.topology import FileError
from kvroute.topology.document import read_section
from kvroute.topology.schema import ClusterFile
from kvroute.topology.units import quantity
from kvroute.types import InputError, InputErrors

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTED, KEYED, ASKED = re.findall(
    r"```yaml\n(gateway:\n.*?)```", (ROOT / "docs" / "cluster-file.md").read_text(encoding="utf-8"), re.S
)
SERVE = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
OFFLOADED, OBSERVED, CONVERTED, SALTED = re.findall(r"```yaml\n(gateway:\n.*?)```", SERVE, re.S)
FULL = f"""\
gateway:
  listen: {{host: 0.0.0.0, port: 8443}}
  admin: {{host: "::1", port: 9999, push_token: 0123456789abcdefg, hosts: [gateway.example]}}
  policy: cla
  parameters: {{cache_weight: 2, load_weight: 0.5}}
  prefill: least-loaded
  constraint: pod:preferred:0.5
  reserve: 2 GB
  reserve_output_tokens: 1024
  models: {{llama: llama-3-70b}}
  oracle:
    source: prometheus
    self_measured: false
    separates_own_traffic: false
    stale_after: 1 min
    prediction: trend
    prometheus: {{url: "https://prom:9090/base", per_link: {{query: up, label: cable}}, timeout: 100 ms}}
  prompt: {{block_tokens: 64, bytes_per_token: 3}}
  prefix: approximate
  limits: {{body: 1 MiB, headers: 8 KB, connections: 10, in_flight: 5, queue: 0, queue_wait: 1 s, per_key: 2}}
  timeouts: {{connect: 1 ms, prefill: 24 h, first_token: 1 s, between_tokens: 1 s, drain: 1 s}}
  retries: {{share: 0, floor_per_s: 0.5, attempts: 1}}
  breaker: {{failures: 1, window: 1 s, share: 1, open: 1 s}}
  health: {{path: /healthz, interval: 1 s, timeout: 1 s, failures: 1, slow_start: 0 s}}
  scrape: {{path: "/metrics?all=1", interval: 1 s}}
  keys: {{known: {{alice: "{hash_text("a")}"}}, concurrency: {{alice: 3}}}}
  upstream_key_env: ENGINE_KEY
  tracing: {{otlp: "http://otel:4318/v1/traces", share: 0.1}}
  log: {{level: debug, format: json, access: true}}
  measure: engine
  offload:
    threshold: 19.4K tokens
    stay_factor: 3
    check_interval: 500 ms
    short_term: {{enabled: false, utilisation_high: 0.9, queue_low: 0 s, step: 1.5, dwell: 1 s, threshold_max: 2M}}
    long_term: {{review: 5 s, window: 1 min, requests_min: 7, gain_min: 0.1, at_once: 2, prefill_min: 0}}
    wan_path: {{failures: 9, open: 1 s}}
    role_switch: {{url: "http://hook:8000/convert", drain: 1 s, timeout: 2 s, back_off: 3 s}}
"""
ENVIRON = {"ENGINE_KEY": "x", "WITH_NEWLINE": "x\n"}
MACHINES = """\
name: live
nodes: [{name: node0}]
timing: {default: {prefill: {kind: linear, per_token: 90 us}, decode: {base: 10 ms}}}
defaults: {model: llama-3-70b, kv_capacity: 80 GB}
"""
FIRST = '  - {name: prefill0, role: prefill, gpus: "node0:0", endpoint: {url: "http://a:1"}}\n'
SECOND = '  - {name: decode0, role: decode, gpus: "node0:1", endpoint: {url: "http://b:1"}}\n'
LIVE = MACHINES + "instances:\n" + FIRST + SECOND


def said(text: str, environ: dict[str, str] | None = None) -> list[FileError]:
    """Return the errors of a section."""
    with pytest.raises(InputErrors) as caught:
        settings_of(text, "f", ENVIRON if environ is None else environ)
    problems = caught.value.problems
    assert [str(problem) for problem in problems] == list(dict.fromkeys(str(problem) for problem in problems))
    return [problem for problem in problems if isinstance(problem, FileError)]


def refused(text: str, *, embedded: bool = False) -> list[FileError]:
    """Return the errors of a whole file."""
    with pytest.raises(InputErrors) as caught:
        deployment_of(text, "f", embedded=embedded, environ={})
    return [problem for problem in caught.value.problems if isinstance(problem, FileError)]


def test_the_documented_defaults_are_the_defaults() -> None:
    assert settings_of(DOCUMENTED, "f") == GatewaySettings() == settings_of("name: a\n", "f")
    keys = re.findall(r"^  (\w+):", DOCUMENTED, re.M)
    assert set(keys) | {"reserve", "upstream_key_env", "cache_salt_secret_env", "offload"} == {
        field.encode_name for field in msgspec.structs.fields(GatewaySettings)
    }


def test_the_documented_examples_are_read(tmp_path: Path) -> None:
    (tmp_path / "gateway.keys").write_text(f"alice: {hash_text('a')}\n", encoding="utf-8")
    keyed = settings_of(KEYED, str(tmp_path / "cluster.yaml"), ENVIRON)
    assert keyed.keys.file == str(tmp_path / "gateway.keys")
    asked = settings_of(ASKED, "f").oracle
    assert asked.prometheus is not None
    assert asked.prometheus.per_tier is not None
    assert asked.prometheus.per_tier["rack"] == 'max(uplink_utilisation{level="rack"})'


def test_a_full_section_says_what_it_says() -> None:
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


def test_what_is_said_of_offloading_is_what_the_core_gets(tmp_path: Path) -> None:
    program = "gateway: {offload: {role_switch: {command: [./convert, now]}}}"
    named = settings_of(program, str(tmp_path / "cluster.yaml")).offload
    assert named is not None
    assert named.role_switch is not None
    assert named.role_switch.command == [str(tmp_path / "convert"), "now"]
    read = settings_of(FULL, "f", ENVIRON)
    spec = read.control_spec().offload
    assert spec is not None
    assert (spec.threshold_tokens, spec.rule, spec.layerwise, spec.stay_factor) == (19_400.0, "scarce", False, 3.0)
    copying = settings_of("gateway: {offload: {rule: auto, abundant_below: 0.2, copy: {min: 2K tokens}}}", "f").offload
    assert copying is not None
    read_as = (copying.spec().rule, copying.spec().abundant_below, copying.spec().copy_min_tokens, copying.copy_s)
    assert read_as == ("auto", 0.2, 2_000, 5.0)
    short = ShortTerm(
        enabled=False, utilisation_high=0.9, queue_low_s=0.0, step=1.5, dwell_s=1.0, threshold_max_tokens=2e6
    )
    long = LongTerm(review_s=5.0, window_s=60.0, requests_min=7, gain_min=0.1, at_once=2, prefill_min=0)
    assert (spec.short_term, spec.long_term) == (short, long)


def test_the_documented_defaults_of_offloading_are_the_defaults() -> None:
    """The documented defaults equal those of the settings, and those of the policy except where live engines cannot
    follow it."""
    read = settings_of(OFFLOADED, "f").offload
    assert settings_of("gateway: {offload: {}}", "f").offload == OffloadSection()
    assert read is not None
    assert msgspec.structs.replace(read, short_term=OffloadSection().short_term) == OffloadSection()
    assert msgspec.to_builtins(read.spec()) == msgspec.to_builtins(
        OffloadSpec(rule="scarce", layerwise=False, long_term=LongTerm(conversions=False))
    )
    assert settings_of(SALTED, "f", None).cache_salt == "per-tenant"
    assert settings_of(OBSERVED, "f").oracle.prometheus is not None
    converted = settings_of(CONVERTED, "f")
    assert converted.offload is not None
    assert converted.offload.role_switch == RoleSwitchSection(url="http://10.0.0.9:8000/convert")
    spec = converted.control_spec().offload
    assert spec is not None
    assert spec.long_term.conversions


@pytest.mark.parametrize(
    ("written", "number"),
    [("19400", 19_400.0), ("19.4K tokens", 19_400.0), ("19.4K", 19_400.0), ("2M", 2e6), ("512 tokens", 512.0)],
)
def test_lengths_are_numbers_or_text(written: str, number: float) -> None:
    read = settings_of(f"gateway: {{offload: {{short_term: {{threshold_max: {written}, threshold_min: 1}}}}}}", "f")
    assert read.offload is not None
    assert read.offload.spec().short_term.threshold_max_tokens == number


OFFLOAD_FAULTS = {
    "rule": ("rule: abundant", "gateway.offload.rule", "copies cached prefixes between datacenters"),
    "auto": ("rule: auto", "gateway.offload.rule", "write `rule: scarce`"),
    "no time to copy": ("copy: {timeout: 0 s}", "gateway.offload.copy.timeout", "between 1 ms and 24 h"),
    "no hook": ("role_switch: {drain: 1 s}", "gateway.offload.role_switch", "has neither"),
    "two hooks": ('role_switch: {url: "http://a/b", command: [c]}', "gateway.offload.role_switch", "not both"),
    "hook of nowhere": ('role_switch: {url: "ftp://a"}', "gateway.offload.role_switch.url", "http://"),
    "unknown place": ('role_switch: {url: "http://a/{instance}"}', "gateway.offload.role_switch.url", "http://"),
    "no command": ("role_switch: {command: []}", "gateway.offload.role_switch.command", "length >= 1"),
    "tokens": ("threshold: 19 bananas", "gateway.offload.threshold", "19.4K tokens"),
    "below the bounds": ("threshold: 10", "gateway.offload.threshold", "outside [1000, 1e+06]"),
    "no band": ("short_term: {utilisation_low: 0.99}", "gateway.offload.short_term", "leave no gap"),
    "no factor": ("short_term: {step: 1}", "gateway.offload.short_term.step", "not a factor above 1"),
    "bounds": ("short_term: {threshold_min: 2M}", "gateway.offload.short_term", "not a valid range"),
    "share": ("long_term: {gain_min: 1}", "gateway.offload.long_term.gain_min", "a share between 0 and 1"),
    "unknown": ("long_term: {reviews: 5 s}", "gateway.offload.long_term.reviews", "did you mean 'review'"),
}


@pytest.mark.parametrize(("line", "field", "said_of_it"), OFFLOAD_FAULTS.values(), ids=OFFLOAD_FAULTS)
def test_faults_of_offloading_are_told_with_their_line(line: str, field: str, said_of_it: str) -> None:
    (problem,) = said(f"gateway:\n  policy: netkv\n  offload:\n    {line}\n")
    assert (problem.line, problem.field) == (4, field)
    assert said_of_it in str(problem)


@pytest.mark.parametrize("protocol", ["sglang", "mooncake"])
def test_prefixes_are_copied_by_one_protocol_only(protocol: str) -> None:
    """Prefill instances with another protocol are named, with their lines; `scarce` copies nothing and needs no
    protocol."""
    text = (ROOT / "examples" / "two-datacenters.yaml").read_text(encoding="utf-8")
    ports = iter(range(8000, 9000))

    def reached(match: re.Match[str]) -> str:
        endpoint = f'{{url: "http://h:{next(ports)}", protocol: {protocol}, bootstrap: "h:1"}}'
        return f"{match[0][:-1]}, endpoint: {endpoint}}}"

    text = re.sub(r"\{name: \S+, role: (\w+), gpus: .*\}", reached, text) + "    copy: {}\n"
    assert deployment_of(text, "f", environ={})
    problems = refused(text + "    rule: auto\n")
    assert {problem.field for problem in problems} == {f"instances[{k}].endpoint" for k in range(7)}
    assert all(f"{protocol} does not support" in str(problem) for problem in problems)


def test_a_cluster_that_cannot_offload_is_told_so() -> None:
    (problem,) = refused(LIVE + "gateway:\n  offload: {}\n")
    assert problem.field == "gateway.offload"
    assert "no datacenter has prefill instances only" in str(problem)


def test_offloading_is_not_held_against_nodes_that_could_not_be_read() -> None:
    """The placeholder for the number of GPUs has no NIC per GPU."""
    text = (ROOT / "examples" / "two-datacenters.yaml").read_text(encoding="utf-8")
    (problem,) = refused(
        text.replace("{name: fast1, rack: fast-rack, gpus: 8", "{name: fast1, rack: fast-rack, gpus: 8x")
    )
    assert problem.field == "nodes[1].gpus"


def test_a_decode_instance_that_may_come_to_prefill_needs_its_bootstrap_server() -> None:
    text = (ROOT / "examples" / "two-datacenters.yaml").read_text(encoding="utf-8")
    ports = iter(range(8000, 9000))

    def reached(match: re.Match[str]) -> str:
        port, bootstrap = next(ports), ', bootstrap: "h:1"' if match[1] == "prefill" else ""
        return f'{match[0][:-1]}, endpoint: {{url: "http://h:{port}", protocol: mooncake{bootstrap}}}}}'

    text = re.sub(r"\{name: \S+, role: (\w+), gpus: .*\}", reached, text)
    assert deployment_of(text, "f", environ={})
    problems = refused(text + "    role_switch: {command: [convert]}\n")
    assert {problem.field for problem in problems} == {f"instances[{k}].endpoint" for k in range(7, 12)}
    assert all("bootstrap" in str(problem) for problem in problems)


@pytest.mark.parametrize("section", ["offload: {layerwise: true}", "layerwise: true"])
def test_who_is_asked_early_must_say_where(section: str) -> None:
    """Layer-wise transfer from prefill-only sites or everywhere needs a bootstrap address; emulated engines have one by
    themselves."""
    text = (ROOT / "examples" / "two-datacenters.yaml").read_text(encoding="utf-8").partition("\ngateway:")[0]
    text += f"\ngateway:\n  {section}\n"
    assert deployment_of(text, "f", embedded=True, environ={})
    ports = iter(range(8000, 9000))

    def reached(protocol: str, more: str) -> str:
        def entry(match: re.Match[str]) -> str:
            return f'{match[0][:-1]}, endpoint: {{url: "http://h:{next(ports)}", protocol: {protocol}{more}}}}}'

        return re.sub(r"\{name: \S+, role: (\w+), gpus: .*\}", entry, text)

    early = {f"instances[{k}].endpoint" for k in range(4 if "offload" in section else 7)}
    problems = refused(reached("vllm", ""))
    assert {problem.field for problem in problems} == early
    assert all("add `bootstrap: HOST:PORT`" in str(problem) for problem in problems)
    problems = refused(reached("mooncake", ', bootstrap: "h:1"'))
    assert {problem.field for problem in problems} == early
    assert all("mooncake does not support" in str(problem) for problem in problems)
    for protocol in ("vllm", "sglang"):
        assert deployment_of(reached(protocol, ', bootstrap: "h:1"'), "f", environ={})


def test_the_defaults_make_a_core() -> None:
    cluster, read = deployment_of(LIVE, "f")
    assert read.control_spec().build(cluster).handle is not None
    assert read.control_spec().oracle.self_measured


TOKEN = re.compile(r"(?<=[{\[ ])(?:\"[^\"]*\"|[^\s{}\[\],:\"]+(?: [a-zA-Z]+)?)(?=[,}\]\n])")
KEY = re.compile(r"(?<=[{ ])[a-z_]+(?=:(?: |$))", re.M)


@st.composite
def corrupted(draw: st.DrawFn) -> tuple[str, int]:
    """Draw a full section with one key or value replaced by an invalid one, and its line."""
    if draw(st.booleans()):
        start, end = draw(st.sampled_from([m.span() for m in KEY.finditer(FULL) if m[0] not in ("alice", "llama")]))
        new = draw(st.sampled_from(["kye", "Listen", "no-such-key"]))
    else:
        start, end = draw(st.sampled_from([match.span() for match in TOKEN.finditer(FULL)]))
        new = draw(st.sampled_from(["[1, {a: b}]", "{}", "-7", ".inf", ".nan", '"\\n"', "!!binary x", "*a", ""]))
        if new == "" and FULL[end] not in ",}\n":
            new = "{}"
    return FULL[:start] + new + FULL[end:], FULL.count("\n", 0, start) + 1


@given(corrupted())
@settings(max_examples=150, deadline=None)
def test_every_corruption_is_named_on_its_line(drawn: tuple[str, int]) -> None:
    text, line = drawn
    problems = said(text)
    assert line in [problem.line for problem in problems], [str(problem) for problem in problems]
    assert all(problem.what and problem.field.startswith("gateway") for problem in problems)
    assert [problem.line for problem in problems] == sorted(problem.line for problem in problems)


def section(text: str) -> str:
    return f"gateway:\n  {text}\n"


PROMETHEUS = "source: prometheus, prometheus: {url: 'http://p'"
FAULTS = {
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
    "parameter": ("parameters: {speed: 1}", "parameters", "'foresight' has no parameter 'speed'; it takes"),
    "bad parameter": ("{policy: cla, parameters: {load_weight: -1}}", "parameters", "use 0 or more"),
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
    found = {pair for kind in kinds for pair in patterns(kind) if pair[0] not in MULTILINE}
    assert len(found) >= 8
    for pattern, example in found:
        fitting = FITTING.get(pattern, example)
        assert re.search(pattern, fitting), (pattern, fitting)
        assert not re.search(pattern, fitting + "\n"), pattern


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_says_where_and_how_to_mend(fault: str) -> None:
    text, field, sentence = FAULTS[fault]
    found = {(problem.field, str(problem)) for problem in said(section(text))}
    place = f"gateway.{field}" if field else "gateway"
    assert any(where.startswith(place) and sentence in what for where, what in found), found


@pytest.mark.parametrize("text", ["admin: {push_token: short-secret}", "keys: {known: {alice: kvr_short-secret}}"])
def test_a_secret_is_not_repeated(text: str) -> None:
    (problem,) = said(section(text))
    assert "short-secret" not in str(problem)
    assert "the value does not fit" in str(problem)


def test_all_faults_are_named_at_once_and_on_their_lines() -> None:
    lines = [
        "gateway:",
        "policy: a",
        "prefill: b",
        "constraint: c",
        "prompt: {tokenizer: d}",
        "oracle: {source: push, a: 1}",
    ]
    text = "\n  ".join(lines)
    assert [problem.line for problem in said(text)] == [2, 3, 4, 5, 6]
    text = text.replace(", a: 1", ", prometheus: {url: 'http://p'}")
    assert [problem.line for problem in said(text)] == [2, 3, 4, 5, 6, 6]


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
def test_no_fault_hides_another(parts: list[str]) -> None:
    text = "\n  ".join(["gateway:", *parts])
    assert [problem.line for problem in said(text)] == list(range(2, 2 + len(parts)))


def test_a_section_is_read_whatever_stands_beside_it() -> None:
    """The line numbers are those of the file; errors of other sections are not reported."""
    text = "nodes: *none\nname: 7\ngateway:\n  policy: cla\n"
    value, lines = read_section(text, "f", "gateway", GatewaySettings)
    assert (value.policy, lines.error("x", ("gateway", "policy")).line) == ("cla", 4)
    with pytest.raises(InputErrors, match="f:3: gateway: 'gateway' has no value"):
        read_section("a: 1\n\ngateway:\n", "f", "gateway", GatewaySettings)
    with pytest.raises(InputErrors, match="not YAML"):
        read_section("a: [\n", "f", "gateway", GatewaySettings)


def test_a_wait_of_exactly_a_millisecond_is_one() -> None:
    assert quantity(Wait, "1 ms") == 1e-3
    with pytest.raises(InputError, match="between 1 ms and 24 h"):
        quantity(Wait, "0.9 ms")


# The whole file


def test_a_deployment_is_a_cluster_and_its_settings() -> None:
    cluster, read = deployment_of(LIVE + "gateway: {models: {llama: llama-3-70b}}\n", "f")
    assert [instance.name for instance in cluster.instances] == ["decode0", "prefill0"]
    assert read.models == {"llama": "llama-3-70b"}


def test_faults_of_cluster_and_section_are_told_together_and_once() -> None:
    text = LIVE.replace("90 us", "90") + "gateway:\n  policy: a\n"
    assert [problem.line for problem in refused(text)] == [3, 9]
    assert len(refused(LIVE + "gateway: *a\n")) == 1
    assert len(refused("a: [")) == 1


SGLANG = 'url: "http://a:1", protocol: sglang'
LIVE_FAULTS = {
    "no endpoint": (LIVE.replace(', endpoint: {url: "http://b:1"}', ""), 7, "decode0 has no endpoint; add `endpoint:"),
    "same engine": (LIVE.replace("http://b:1", "http://A:1"), 7, "is already the endpoint of prefill0"),
    "no bootstrap": (LIVE.replace('url: "http://a:1"', SGLANG), 6, "sglang needs the prefill engine's bootstrap"),
    "lone prefill": (LIVE.replace('url: "http://a:1"', SGLANG), 6, "prefill0 has no decode instance to work with"),
    "lone decode": (LIVE.replace('url: "http://a:1"', SGLANG), 7, "decode0 has no prefill instance to work with"),
    "no partner for a model": (
        LIVE.replace("role: decode,", "role: decode, model: llama-3-8b,"), 7, "none for llama-3-8b uses vllm",
    ),
    "replay alone": (
        LIVE.replace('"http://b:1"', '"http://b:1", kv_replay: "tcp://b:2"'), 7, "`kv_replay` requires `kv_events`",
    ),
    "no events": (LIVE + "gateway: {prefix: events}\n", 6, "`prefix: events` needs the KV events of prefill0"),
    "unknown model": (LIVE + "gateway: {models: {a: llama-3-7b}}\n", 8, "did you mean 'llama-3-70b'?"),
    "shorthand": (MACHINES + "instances: {prefill: 1, decode: 1}\n", 5, "or serve emulated engines with --embedded"),
}  # fmt: skip


@pytest.mark.parametrize("fault", LIVE_FAULTS)
def test_each_obstacle_to_serving_says_where_and_how_to_mend(fault: str) -> None:
    text, line, sentence = LIVE_FAULTS[fault]
    found = [(problem.line, str(problem)) for problem in refused(text)]
    assert any(where == line and sentence in what for where, what in found), found
    assert [where for where, _ in found] == sorted(where for where, _ in found)


def test_emulated_engines_need_no_endpoint() -> None:
    for fault in ("no endpoint", "shorthand", "no bootstrap", "no events"):
        assert deployment_of(LIVE_FAULTS[fault][0], "f", embedded=True)[0].name == "live"
    assert refused(LIVE_FAULTS["unknown model"][0], embedded=True)


@given(
    st.lists(
        st.tuples(st.sampled_from(["prefill", "decode", "both"]), st.sampled_from(["vllm", "mooncake", "sglang"])),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=80, deadline=None)
def test_a_served_cluster_has_partners_for_every_protocol(instances: list[tuple[str, str]]) -> None:
    """A cluster is accepted exactly if each protocol with a prefill-only instance has a decode-only instance, and the
    reverse."""
    text = MACHINES + "instances:\n"
    for index, (role, protocol) in enumerate(instances):
        endpoint = f'{{url: "http://h{index}:1", protocol: {protocol}, bootstrap: "h{index}:2"}}'
        text += f'  - {{name: i{index}, role: {role}, gpus: "node0:{index}", endpoint: {endpoint}}}\n'
    kinds = set(instances)
    both_roles = all({role for role, _ in kinds} & {role, "both"} for role in ("prefill", "decode"))
    paired = all((("prefill", p) in kinds) == (("decode", p) in kinds) for p in ("vllm", "mooncake", "sglang"))
    try:
        deployment_of(text, "f")
    except InputErrors:
        assert not (both_roles and paired)
    else:
        assert both_roles
        assert paired


# Files named in the cluster file


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two certificates and their keys, a.pem and b.pem, and a.key encrypted as locked.key."""
    folder = tmp_path_factory.mktemp("tls")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost"]
    for name in ("a", "b"):
        files = ["-keyout", f"{name}.key", "-out", f"{name}.pem"]
        subprocess.run(["openssl", "req", "-x509", *curve, *files], cwd=folder, check=True, capture_output=True)
    lock = ["openssl", "ec", "-in", "a.key", "-aes128", "-passout", "pass:word", "-out", "locked.key"]
    subprocess.run(lock, cwd=folder, check=True, capture_output=True)
    return folder


def test_paths_start_at_the_files_folder(certificates: Path) -> None:
    (certificates / "tokenizer.json").write_text("{}", encoding="utf-8")
    (certificates / "keys").write_text(f"alice: {hash_text('a')}\n", encoding="utf-8")
    inside = "listen: {tls: {certificate: a.pem, key: ./a.key}}, prompt: {tokenizer: .}, keys: {file: keys}"
    text = f"gateway: {{{inside}, log: {{events: e}}}}"
    read = settings_of(text, str(certificates / "cluster.yaml"))
    assert read.listen.tls == TlsSettings(certificate=str(certificates / "a.pem"), key=str(certificates / "a.key"))
    assert (read.prompt.tokenizer, read.keys.file) == (str(certificates), str(certificates / "keys"))
    assert read.log.events == str(certificates / "e")
    assert isinstance(tls_context(read.listen.tls), ssl.SSLContext)


@pytest.mark.parametrize("key", ["b.key", "locked.key", "b.pem"])
def test_a_certificate_needs_its_own_open_key(certificates: Path, key: str) -> None:
    text = f"gateway:\n  listen: {{tls: {{certificate: a.pem, key: {key}}}}}\n"
    with pytest.raises(InputErrors, match=r"gateway\.listen\.tls: certificate and key cannot be used") as caught:
        settings_of(text, str(certificates / "cluster.yaml"))
    assert [getattr(problem, "line", 0) for problem in caught.value.problems] == [2]


def test_a_key_files_faults_are_told_with_its_own_lines(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice: kvr_secret\n", encoding="utf-8")
    with pytest.raises(InputErrors) as caught:
        settings_of("gateway:\n  policy: a\n  keys: {file: keys}\n", str(tmp_path / "cluster.yaml"))
    assert len(caught.value.problems) == 2
    assert f"{tmp_path / 'keys'}:1: alice: the value does not fit" in str(caught.value)
    assert "secret" not in str(caught.value)

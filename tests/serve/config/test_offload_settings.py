"""The `offload` section: documented defaults, what the core receives, and errors with their lines."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from tests.serve.config.settings_rig import ENVIRON, FULL, LIVE, ROOT, file_errors, section_errors

from kvroute.policies.fleet.offload import OffloadSpec
from kvroute.policies.fleet.role_switch import LongTerm
from kvroute.policies.fleet.short_term import ShortTerm
from kvroute.serve.config.offload import OffloadSection, RoleSwitchSection
from kvroute.serve.config.preflight import deployment_of, settings_of
from kvroute.serve.config.settings import SessionAffinitySettings

SERVE = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
OFFLOADED, OBSERVED, SWITCHED, SALTED, ADAPTED, SESSIONS = re.findall(r"```yaml\n(gateway:\n.*?)```", SERVE, re.S)


def test_the_core_receives_the_offload_settings_of_the_file(tmp_path: Path) -> None:
    program = "gateway: {offload: {role_switch: {command: [./switch, now]}}}"
    named = settings_of(program, str(tmp_path / "cluster.yaml")).offload
    assert named is not None
    assert named.role_switch is not None
    assert named.role_switch.command == [str(tmp_path / "switch"), "now"]
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
        OffloadSpec(rule="scarce", layerwise=False, long_term=LongTerm(role_switches=False))
    )
    assert settings_of(SALTED, "f", None).cache_salt == "per-tenant"
    assert settings_of(SESSIONS, "f").session_affinity == SessionAffinitySettings()
    assert settings_of(ADAPTED, "f").control_spec().adapters == {"chat": 2.0, "sql": 0.5}
    assert settings_of(OBSERVED, "f").oracle.prometheus is not None
    switched = settings_of(SWITCHED, "f")
    assert switched.offload is not None
    assert switched.offload.role_switch == RoleSwitchSection(url="http://10.0.0.9:8000/role")
    spec = switched.control_spec().offload
    assert spec is not None
    assert spec.long_term.role_switches


OFFLOAD_ERRORS = {
    "rule": ("rule: abundant", "gateway.offload.rule", "copies cached prefixes between datacenters"),
    "auto": ("rule: auto", "gateway.offload.rule", "write `rule: scarce`"),
    "no time to copy": ("copy: {timeout: 0 s}", "gateway.offload.copy.timeout", "between 1 ms and 24 h"),
    "no hook": ("role_switch: {drain: 1 s}", "gateway.offload.role_switch", "has neither"),
    "two hooks": ('role_switch: {url: "http://a/b", command: [c]}', "gateway.offload.role_switch", "not both"),
    "hook of nowhere": ('role_switch: {url: "ftp://a"}', "gateway.offload.role_switch.url", "http://"),
    "unknown place": ('role_switch: {url: "http://a/{instance}"}', "gateway.offload.role_switch.url", "http://"),
    "no command": ("role_switch: {command: []}", "gateway.offload.role_switch.command", "write 1 or more"),
    "tokens": ("threshold: 19 bananas", "gateway.offload.threshold", "19.4K tokens"),
    "below the bounds": ("threshold: 10", "gateway.offload.threshold", "outside [1000, 1e+06]"),
    "no band": ("short_term: {utilisation_low: 0.99}", "gateway.offload.short_term", "leave no gap"),
    "no factor": ("short_term: {step: 1}", "gateway.offload.short_term.step", "not a factor above 1"),
    "bounds": ("short_term: {threshold_min: 2M}", "gateway.offload.short_term", "not a valid range"),
    "share": ("long_term: {gain_min: 1}", "gateway.offload.long_term.gain_min", "a share between 0 and 1"),
    "unknown": ("long_term: {reviews: 5 s}", "gateway.offload.long_term.reviews", "did you mean 'review'"),
}


@pytest.mark.parametrize(("line", "field", "message"), OFFLOAD_ERRORS.values(), ids=OFFLOAD_ERRORS)
def test_errors_of_the_offload_section_give_their_line(line: str, field: str, message: str) -> None:
    (problem,) = section_errors(f"gateway:\n  policy: netkv\n  offload:\n    {line}\n")
    assert (problem.line, problem.field) == (4, field)
    assert message in str(problem)


@pytest.mark.parametrize("protocol", ["sglang", "mooncake"])
def test_prefix_copies_need_the_vllm_protocol(protocol: str) -> None:
    """Prefill instances with another protocol are named, with their lines; `scarce` copies nothing and needs no
    protocol."""
    text = (ROOT / "examples" / "two-datacenters.yaml").read_text(encoding="utf-8")
    ports = iter(range(8000, 9000))

    def with_endpoint(match: re.Match[str]) -> str:
        endpoint = f'{{url: "http://h:{next(ports)}", protocol: {protocol}, bootstrap: "h:1"}}'
        return f"{match[0][:-1]}, endpoint: {endpoint}}}"

    text = re.sub(r"\{name: \S+, role: (\w+), gpus: .*\}", with_endpoint, text) + "    copy: {}\n"
    assert deployment_of(text, "f", environ={})
    problems = file_errors(text + "    rule: auto\n")
    assert {problem.field for problem in problems} == {f"instances[{k}].endpoint" for k in range(7)}
    assert all(f"{protocol} does not support" in str(problem) for problem in problems)


def test_an_offload_section_without_a_second_site_is_rejected() -> None:
    (problem,) = file_errors(LIVE + "gateway:\n  offload: {}\n")
    assert problem.field == "gateway.offload"
    assert "no datacenter has prefill instances only" in str(problem)


def test_offload_checks_skip_nodes_with_errors() -> None:
    """The placeholder for the number of GPUs has no NIC per GPU."""
    text = (ROOT / "examples" / "two-datacenters.yaml").read_text(encoding="utf-8")
    (problem,) = file_errors(
        text.replace("{name: fast1, rack: fast-rack, gpus: 8", "{name: fast1, rack: fast-rack, gpus: 8x")
    )
    assert problem.field == "nodes[1].gpus"


def test_a_decode_instance_that_may_switch_to_prefill_needs_a_bootstrap_address() -> None:
    text = (ROOT / "examples" / "two-datacenters.yaml").read_text(encoding="utf-8")
    ports = iter(range(8000, 9000))

    def with_endpoint(match: re.Match[str]) -> str:
        port, bootstrap = next(ports), ', bootstrap: "h:1"' if match[1] == "prefill" else ""
        return f'{match[0][:-1]}, endpoint: {{url: "http://h:{port}", protocol: mooncake{bootstrap}}}}}'

    text = re.sub(r"\{name: \S+, role: (\w+), gpus: .*\}", with_endpoint, text)
    assert deployment_of(text, "f", environ={})
    problems = file_errors(text + "    role_switch: {command: [switch]}\n")
    assert {problem.field for problem in problems} == {f"instances[{k}].endpoint" for k in range(7, 12)}
    assert all("bootstrap" in str(problem) for problem in problems)


def test_data_parallel_ranks_switch_no_roles() -> None:
    """The hook would restart the whole engine. One fault for each engine, however many ranks it has."""
    text = (ROOT / "examples" / "two-datacenters.yaml").read_text(encoding="utf-8")
    ports = iter(range(8000, 9000))

    def with_endpoint(match: re.Match[str]) -> str:
        return f'{match[0][:-1]}, endpoint: {{url: "http://h:{next(ports)}"}}}}'

    text = re.sub(r"\{name: \S+, role: (\w+), gpus: .*\}", with_endpoint, text)
    ranks = re.sub(r"\{(name: decode0, role: decode)", r"{\1, tp: 1, dp: 8", text)
    assert deployment_of(ranks, "f", environ={})
    (problem,) = file_errors(ranks + "    role_switch: {command: [switch]}\n")
    assert "decode0 has several data-parallel ranks" in str(problem)
    assert ranks.splitlines()[problem.line - 1].strip().startswith("- {name: decode0,")


@pytest.mark.parametrize("section", ["offload: {layerwise: true}", "layerwise: true"])
def test_layerwise_transfers_need_bootstrap_addresses(section: str) -> None:
    """Layer-wise transfer from prefill-only sites or everywhere needs a bootstrap address; emulated engines have one by
    themselves."""
    text = (ROOT / "examples" / "two-datacenters.yaml").read_text(encoding="utf-8").partition("\ngateway:")[0]
    text += f"\ngateway:\n  {section}\n"
    assert deployment_of(text, "f", embedded=True, environ={})
    ports = iter(range(8000, 9000))

    def with_endpoints(protocol: str, more: str) -> str:
        def with_endpoint(match: re.Match[str]) -> str:
            return f'{match[0][:-1]}, endpoint: {{url: "http://h:{next(ports)}", protocol: {protocol}{more}}}}}'

        return re.sub(r"\{name: \S+, role: (\w+), gpus: .*\}", with_endpoint, text)

    early = {f"instances[{k}].endpoint" for k in range(4 if "offload" in section else 7)}
    problems = file_errors(with_endpoints("vllm", ""))
    assert {problem.field for problem in problems} == early
    assert all("add `bootstrap: HOST:PORT`" in str(problem) for problem in problems)
    problems = file_errors(with_endpoints("mooncake", ', bootstrap: "h:1"'))
    assert {problem.field for problem in problems} == early
    assert all("mooncake does not support" in str(problem) for problem in problems)
    for protocol in ("vllm", "sglang"):
        assert deployment_of(with_endpoints(protocol, ', bootstrap: "h:1"'), "f", environ={})

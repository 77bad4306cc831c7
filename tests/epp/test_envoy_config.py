"""The configuration of Envoy that `kvroute epp` prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.lifecycle.membership_rig import DISCOVERY
from tests.serve.rig import CLUSTER

from kvroute.cli.app import main
from kvroute.epp.envoy_config import EnvoySpec, envoy_config
from kvroute.epp.messages import ATTEMPTS, DESTINATION, metadata_of
from kvroute.serve.api.passthrough_paths import BUILT_IN, COMPLETIONS, OWN, READ, PassthroughPaths
from kvroute.serve.lifecycle.deployment import Deployment
from kvroute.types import InputError

KNOWN = {path.decode() for path in (*BUILT_IN, *COMPLETIONS, *OWN)}
ENDPOINTS = {"prefill0": 1, "prefill1": 2, "decode0": 3, "decode1": 4}


def file_text(section: str = "", host: str = "10.0.0.1") -> str:
    """Return a cluster file whose instances have endpoints."""
    text = CLUSTER
    for name, port in ENDPOINTS.items():
        text = text.replace(f"name: {name},", f"name: {name}, endpoint: {{url: 'http://{host}:{port}'}},")
    return text + section


def config_of(section: str = "", **options: Any) -> dict[str, Any]:
    """Return the configuration of a file with this section."""
    deployment = Deployment.of(file_text(section), "test.yaml")
    return envoy_config(
        deployment.cluster, deployment.settings, EnvoySpec("10.0.0.9:9002", **options), deployment.source
    )


def discovered_config(section: str = "", **options: Any) -> dict[str, Any]:
    """Return the configuration of a file whose engines are discovered."""
    deployment = Deployment.of(DISCOVERY + section, "test.yaml")
    return envoy_config(
        deployment.cluster, deployment.settings, EnvoySpec("10.0.0.9:9002", **options), deployment.source
    )


def filters_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the HTTP filters by name."""
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return {
        http_filter["name"].rpartition(".")[2]: http_filter["typed_config"] for http_filter in manager["http_filters"]
    }


@pytest.mark.parametrize(
    ("fail_open", "service"), [(False, "liveness"), (True, "envoy.service.ext_proc.v3.ExternalProcessor")]
)
def test_a_picker_without_engines_is_asked_unless_envoy_fails_open(fail_open: bool, service: str) -> None:
    """Its answer has a sentence; that of an Envoy without a healthy picker is empty."""
    [*_, picker] = config_of(fail_open=fail_open)["static_resources"]["clusters"]
    assert picker["health_checks"][0]["grpc_health_check"]["service_name"] == service


def test_every_instance_is_an_endpoint_and_prefill_instances_serve_nothing_in_turn() -> None:
    """Envoy replaces an endpoint that it does not know, so it must know all of them."""
    pool, picker = config_of()["static_resources"]["clusters"]
    found = {
        group["priority"]: [
            member["endpoint"]["address"]["socket_address"]["port_value"] for member in group["lb_endpoints"]
        ]
        for group in pool["load_assignment"]["endpoints"]
    }
    assert found == {0: [3, 4], 1: [1, 2]}
    [endpoint] = picker["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert endpoint["endpoint"]["address"]["socket_address"] == {"address": "10.0.0.9", "port_value": 9002}


def test_the_listener_faces_clients() -> None:
    """Envoy appends their addresses to `x-forwarded-for` and does not trust headers of its own from them."""
    manager = config_of()["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    assert manager["use_remote_address"] is True


def test_retries_and_timeouts_are_those_of_the_gateway() -> None:
    """A change of the file changes both."""
    config = config_of("  retries: {attempts: 5, share: 0.5, floor_per_s: 3}\n  timeouts: {connect: 7 s}\n")
    listener, (pool, _) = config["static_resources"]["listeners"][0], config["static_resources"]["clusters"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    route = manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
    assert route["retry_policy"]["num_retries"] == 4
    assert pool["connect_timeout"] == "7s"
    budget = pool["circuit_breakers"]["thresholds"][0]["retry_budget"]
    assert budget == {"budget_percent": {"value": 50.0}, "min_retry_concurrency": 3}


@pytest.mark.parametrize("fail_open", [False, True])
def test_envoy_fails_as_asked(fail_open: bool) -> None:
    """Open: with a warning for each request. Closed: with status 503."""
    config = config_of(fail_open=fail_open, buffered=True)
    processor = filters_of(config)["ext_proc"]
    assert processor["failure_mode_allow"] is fail_open
    assert processor["processing_mode"]["request_body_mode"] == "BUFFERED"
    assert ("warning: no picker responds" in json.dumps(config)) is fail_open


def test_discovered_engines_have_one_cluster_for_each_attempt() -> None:
    """Each takes its address from the metadata of the picker's choice, which clients cannot set."""
    pool, *attempts, picker = discovered_config("  retries: {attempts: 3}\n")["static_resources"]["clusters"]
    assert [cluster["name"] for cluster in pool["cluster_type"]["typed_config"]["clusters"]] == [
        attempt["name"] for attempt in attempts
    ]
    keys = [attempt["original_dst_lb_config"]["metadata_key"] for attempt in attempts]
    message = {"envoy.lb": {ATTEMPTS: {"1": "10.0.0.1:80", "2": "10.0.0.2:80", "3": "[::1]:80"}}}
    found = [message[key["key"]][key["path"][0]["key"]][key["path"][1]["key"]] for key in keys]
    assert json_format.MessageToDict(metadata_of("10.0.0.1:80,10.0.0.2:80,[::1]:80"))["envoy.lb"] == {
        DESTINATION: "10.0.0.1:80,10.0.0.2:80,[::1]:80",
        **message["envoy.lb"],
    }
    assert found == ["10.0.0.1:80", "10.0.0.2:80", "[::1]:80"]
    assert not any("use_http_header" in attempt["original_dst_lb_config"] for attempt in attempts)
    assert picker["name"] == "kvroute_picker"
    single, _ = discovered_config("  retries: {attempts: 1}\n")["static_resources"]["clusters"]
    assert (single["name"], single["type"]) == (pool["name"], attempts[0]["type"])
    assert single["original_dst_lb_config"] == attempts[0]["original_dst_lb_config"]


def test_requests_without_a_choice_have_a_route_of_their_own() -> None:
    """To the fallback; the route is chosen again after the picker's answer."""
    config = discovered_config(fail_open=True, fallback=("engines.llm.svc:8000",))
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    chosen, other, *_ = manager["route_config"]["virtual_hosts"][0]["routes"]
    [condition] = chosen["match"]["dynamic_metadata"]
    assert condition == {"filter": "envoy.lb", "path": [{"key": DESTINATION}], "value": {"present_match": True}}
    assert (chosen["route"]["cluster"], other["route"]["cluster"]) == ("kvroute_engines", "kvroute_fallback")
    assert filters_of(config)["ext_proc"]["route_cache_action"] == "CLEAR"
    fallback = config["static_resources"]["clusters"][-2]
    [endpoint] = fallback["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert endpoint["endpoint"]["address"]["socket_address"] == {"address": "engines.llm.svc", "port_value": 8000}


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        (file_text(host="engine"), {}, "Envoy needs an IP address"),
        (DISCOVERY, {"fail_open": True}, "--fail open: .*; add --envoy-fallback HOST:PORT"),
        (DISCOVERY, {"fallback": ("a:1",)}, "--envoy-fallback: it has an effect only if Envoy fails open"),
        (file_text(), {"fail_open": True, "fallback": ("a:1",)}, "only if the engines are discovered; leave it out"),
    ],
    ids=["host name", "fail open", "fail closed", "listed"],
)
def test_what_envoy_cannot_do_is_an_error(text: str, options: dict[str, Any], says: str) -> None:
    """One sentence."""
    deployment = Deployment.of(text, "test.yaml")
    with pytest.raises(InputError, match=says):
        envoy_config(deployment.cluster, deployment.settings, EnvoySpec("10.0.0.9:9002", **options), deployment.source)


def route_of(config: dict[str, Any], path: str, method: str) -> str:
    """Return the cluster of a request, or the status of Envoy's own response. Args: `path`: without a query."""
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
        match = route["match"]
        methods = [header["string_match"]["safe_regex"]["regex"] for header in match.get("headers", [])]
        fits = re.fullmatch(match["safe_regex"]["regex"], path) if "safe_regex" in match else path == match.get("path")
        if (fits or match.get("prefix") == "/") and all(re.fullmatch(regex, method) for regex in methods):
            return route["route"]["cluster"] if "route" in route else str(route["direct_response"]["status"])
    raise AssertionError("there is no route")


WORDS = (
    "v1 V1 completions chat responses audio models sleep SLEEP inference in x a%20b a@b wake_up cancel metrics health"
)
SEGMENTS = st.sampled_from(
    [*WORDS.split(), "v1/models/a", "v1/responses/x", "v1/responses/x/cancel", "v1/audio/speech"]
)


@given(
    st.lists(SEGMENTS, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))
    | st.sampled_from(sorted(KNOWN)),
    st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"]),
    st.lists(st.sampled_from(["/inference/*", "/in*", "/x", "/*", "/v1/*", "/sleep"]), unique=True),
)
def test_envoy_lets_the_paths_through_that_the_picker_lets_through(path: str, method: str, listed: list[str]) -> None:
    """A path is normalized by Envoy before."""
    sent = route_of(config_of(f"  passthrough: {json.dumps(listed)}\n"), path, method)
    endpoint = PassthroughPaths(listed).find(path.encode())
    allowed = endpoint.methods if endpoint is not None else frozenset()
    if path.encode() in COMPLETIONS:
        allowed = frozenset({b"POST"})
    elif path == "/v1/models" or path.startswith("/v1/models/"):
        allowed = READ
    expected = "kvroute_engines" if method.encode() in allowed else "200" if path == "/health" else "404"
    if path.startswith("/v1/responses/") and path.endswith("/cancel") and method in ("GET", "HEAD"):
        expected = sent  # the engine refuses it
    if expected == "200" and method not in ("GET", "HEAD"):
        expected = "404"
    assert sent == expected


def test_envoy_normalizes_paths_and_limits_requests_as_the_gateway_does() -> None:
    """And asks no engine while the picker is away."""
    config = config_of("  limits: {headers: 10 KB, header_time: 3 s, keep_alive: 7 s}\n")
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    assert (manager["normalize_path"], manager["merge_slashes"]) == (True, True)
    assert manager["path_with_escaped_slashes_action"] == "UNESCAPE_AND_FORWARD"
    assert (manager["max_request_headers_kb"], manager["request_headers_timeout"]) == (10, "3s")
    assert manager["common_http_protocol_options"] == {"max_headers_count": 128, "idle_timeout": "7s"}
    assert filters_of(config)["ext_proc"]["failure_mode_allow"] is False


def run_epp(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """Run the command; return its exit code and the last line of its errors, else its output."""
    monkeypatch.setattr("sys.argv", ["kvroute", "epp", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, errors = capsys.readouterr()
    return int(ended.value.code or 0), errors.strip().rpartition("\n")[2] if ended.value.code else out


def test_the_command_prints_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one JSON document, with the addresses of the options."""
    file = tmp_path / "cluster.yaml"
    file.write_text(file_text())
    code, text = run_epp(
        capsys, monkeypatch, str(file), "--print-envoy-config", "--envoy-listen", "0.0.0.0:80", "--port", "9002"
    )
    assert code == 0
    listener = json.loads(text)["static_resources"]["listeners"][0]
    assert listener["address"]["socket_address"] == {"address": "0.0.0.0", "port_value": 80}
    assert '"port_value": 9002' in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--fail", "maybe"], "--fail: unknown value 'maybe'; use closed or open"),
        (["--body", "no"], "--body: unknown value 'no'; use streamed or buffered"),
        (["--envoy-fallback", "a:1,b"], "--envoy-fallback: 'b' is not an address; write HOST:PORT"),
        (["--envoy-fallback", "a:1"], "--envoy-fallback: it has an effect only if Envoy fails open; leave it out"),
        (["--pool", "llm/a"], "--pool has no effect without --kubernetes; add --kubernetes"),
        (["--kubernetes", "--pool", "llm/A"], "--pool: 'llm/A' is not the name of an InferencePool; write NAME or"),
        (["--kubernetes", "--pool", "a/b", "--namespace", "c"], "--pool names namespace a, and --namespace c; leave"),
        (["--kubernetes", "--pool", "a", "--namespace", "*"], "--namespace: an InferencePool is in one namespace"),
        (["--kubernetes", "--pool", "a", "--selector", "b"], "--pool and --selector exclude each other; leave"),
        (["--kubernetes", "--embedded"], "--embedded: --embedded and --kubernetes exclude each other"),
        (["--kubernetes", "--fail", "open"], "--fail open: Envoy knows no address of discovered engines while"),
        (["--envoy-listen", "here:1"], "--envoy-listen: 'here:1' is not an address; write IP:PORT"),
        (["--embedded"], "use --envoy-config FILE with --embedded"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    says: str,
) -> None:
    """With exit code 2."""
    file = tmp_path / "cluster.yaml"
    file.write_text(file_text())
    code, error = run_epp(capsys, monkeypatch, str(file), "--print-envoy-config", *arguments)
    assert code == 2
    assert says in error


def test_the_configuration_for_a_pool_needs_neither_file_nor_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is printed without a cluster file; without a source of engines, there is one sentence."""
    code, text = run_epp(capsys, monkeypatch, "--kubernetes", "--pool", "llm/a", "--print-envoy-config")
    assert code == 0
    clusters = json.loads(text)["static_resources"]["clusters"]
    assert [cluster["name"] for cluster in clusters][:2] == ["kvroute_engines", "kvroute_engines_1"]
    code, error = run_epp(capsys, monkeypatch, "--print-envoy-config")
    assert (code, "no cluster file is given; give a YAML file" in error) == (2, True)

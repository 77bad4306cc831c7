"""Checks before serving: each obstacle is reported with its line and its fix; certificates and key files are read."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.serve.config.settings_rig import LIVE, MACHINES, file_errors

from kvroute.serve.api.api_keys import hash_text
from kvroute.serve.config.preflight import deployment_of, settings_of
from kvroute.serve.config.settings import TlsSettings
from kvroute.serve.config.settings_checks import tls_context
from kvroute.types import InputErrors

# The whole file


def test_a_deployment_consists_of_a_cluster_and_its_settings() -> None:
    cluster, read = deployment_of(LIVE + "gateway: {models: {llama: llama-3-70b}}\n", "f")
    assert [instance.name for instance in cluster.instances] == ["decode0", "prefill0"]
    assert read.models == {"llama": "llama-3-70b"}


def test_errors_of_cluster_and_section_are_reported_together_and_once() -> None:
    text = LIVE.replace("90 us", "90") + "gateway:\n  policy: a\n"
    assert [problem.line for problem in file_errors(text)] == [3, 9]
    assert len(file_errors(LIVE + "gateway: *a\n")) == 1
    assert len(file_errors("a: [")) == 1


SGLANG = 'url: "http://a:1", protocol: sglang'
SERVING_ERRORS = {
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
    "unknown model of a tokenizer": (
        LIVE + "gateway: {prompt: {tokenizers: {llama-3-7b: x}}}\n", 8, "did you mean 'llama-3-70b'?",
    ),
    "unknown base model": (
        LIVE + "gateway:\n  adapters:\n    sql: {model: llama-3-7b}\n", 10, "did you mean 'llama-3-70b'?",
    ),
    "base model to be named": (
        LIVE.replace("role: decode,", "role: both, model: llama-3-8b,").replace("role: prefill", "role: both")
        + "gateway: {adapters: {sql: {}}}\n",
        8, "add `model:` with one of llama-3-70b, llama-3-8b",
    ),
    "adapter like a model": (
        LIVE + "gateway: {adapters: {llama-3-70b: {}}}\n", 8, "'llama-3-70b' is also the name of a model",
    ),
    "adapter like an alias": (
        LIVE + "gateway: {models: {sql: llama-3-70b}, adapters: {sql: {}}}\n", 8, "'sql' is also the name of a model",
    ),
    "shorthand": (MACHINES + "instances: {prefill: 1, decode: 1}\n", 5, "or serve emulated engines with --embedded"),
}  # fmt: skip


@pytest.mark.parametrize("fault", SERVING_ERRORS)
def test_each_obstacle_to_serving_gives_its_line_and_a_fix(fault: str) -> None:
    text, line, sentence = SERVING_ERRORS[fault]
    errors = [(problem.line, str(problem)) for problem in file_errors(text)]
    assert any(problem_line == line and sentence in message for problem_line, message in errors), errors
    assert [problem_line for problem_line, _ in errors] == sorted(problem_line for problem_line, _ in errors)


def test_emulated_engines_need_no_endpoint() -> None:
    for fault in ("no endpoint", "shorthand", "no bootstrap", "no events"):
        assert deployment_of(SERVING_ERRORS[fault][0], "f", embedded=True)[0].name == "live"
    assert file_errors(SERVING_ERRORS["unknown model"][0], embedded=True)


@given(
    st.lists(
        st.tuples(st.sampled_from(["prefill", "decode", "both"]), st.sampled_from(["vllm", "mooncake", "sglang"])),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=80, deadline=None)
def test_a_cluster_is_accepted_only_if_each_protocol_has_both_roles(instances: list[tuple[str, str]]) -> None:
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


def test_relative_paths_start_at_the_folder_of_the_file(certificates: Path) -> None:
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
def test_a_certificate_needs_its_own_unencrypted_key(certificates: Path, key: str) -> None:
    text = f"gateway:\n  listen: {{tls: {{certificate: a.pem, key: {key}}}}}\n"
    with pytest.raises(InputErrors, match=r"gateway\.listen\.tls: certificate and key cannot be used") as caught:
        settings_of(text, str(certificates / "cluster.yaml"))
    assert [getattr(problem, "line", 0) for problem in caught.value.problems] == [2]


def test_errors_of_a_key_file_give_its_own_lines(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice: kvr_secret\n", encoding="utf-8")
    with pytest.raises(InputErrors) as caught:
        settings_of("gateway:\n  policy: a\n  keys: {file: keys}\n", str(tmp_path / "cluster.yaml"))
    assert len(caught.value.problems) == 2
    assert f"{tmp_path / 'keys'}:1: alice: the value does not fit" in str(caught.value)
    assert "secret" not in str(caught.value)

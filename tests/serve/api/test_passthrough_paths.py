"""Paths that are passed through: the built-in ones, and wildcards that never cover a path that controls an engine."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvroute.serve.api.form_fields import read_form
from kvroute.serve.api.json_fields import RequestError
from kvroute.serve.api.passthrough_paths import BUILT_IN, PassthroughPaths, passthrough_fault

CONTROL = [
    "/abort_requests",
    "/collective_rpc",
    "/fault_tolerance/apply",
    "/finish_weight_update",
    "/init_weight_transfer_engine",
    "/inference/v1/abort_requests",
    "/pause",
    "/release_kv_cache_memory",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/resume",
    "/scale_elastic_ep",
    "/server_info",
    "/shutdown_weight_transfer_engine",
    "/sleep",
    "/start_draft_weight_update",
    "/start_profile",
    "/start_weight_update",
    "/stop_profile",
    "/update_weight_version",
    "/update_weights",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/wake_up",
    "/weight_info",
    "/admin/x",
    "/flush_cache",
    "/clear_hicache_storage_backend",
    "/get_weights_by_name",
    "/save_remote_model",
    "/abort_request",
    "/update_weights_from_disk",
    "/set_internal_state",
    "/slow_down",
    "/freeze_gc",
    "/configure_logging",
]
"""Paths of vLLM 0.32 and SGLang that change, stop or expose an engine."""


def escaped(path: str, which: list[bool]) -> bytes:
    """Return the path with some characters percent-encoded."""
    flags = which + [False] * len(path)
    return "".join(
        f"%{ord(char):02X}" if char != "/" and flag else char for char, flag in zip(path, flags, strict=False)
    ).encode()


@given(st.sampled_from(CONTROL), st.lists(st.booleans(), max_size=40), st.booleans(), st.sampled_from(["", "/root"]))
def test_wildcards_never_cover_paths_that_control_engines(path: str, which: list[bool], upper: bool, root: str) -> None:
    """However the path is written: percent-encoded, in capitals, or below another one."""
    paths = PassthroughPaths(["/*", "/v1/*", "/inference/*", "/root/*"])
    assert paths.find(escaped(root + (path.upper() if upper else path), which)) is None


@pytest.mark.parametrize("path", CONTROL)
def test_such_a_path_is_passed_through_if_it_is_listed(path: str) -> None:
    found = PassthroughPaths([path]).find(path.encode())
    assert found is not None
    assert found.name == path
    assert passthrough_fault(path) == ("", "")


@given(st.text(alphabet="abc/.%2Fe\\?é\x00", max_size=12))
@example("../sleep")
@example("a/%2e%2e/sleep")
@example("%252e")
def test_wildcards_cover_only_plain_paths(rest: str) -> None:
    """No path has empty or dotted segments, or a further escape, after one decoding."""
    for prefix in ("/x/", "/v1/audio/", "/v1/responses/"):
        path = (prefix + rest).encode("latin-1")
        if PassthroughPaths(["/x/*"]).find(path) is not None:
            plain = path.decode().replace("%2e", ".").replace("%2F", "/")
            assert not {"", ".", ".."} & set(plain[1:].split("/"))


def test_the_longest_listed_prefix_counts_and_own_paths_stay() -> None:
    paths = PassthroughPaths(["/*", "/v1/images/*", "/v1/images/edits"])
    names = {
        "/v2/embed": "/*",
        "/v1/images/generations": "/v1/images/*",
        "/v1/images/edits": "/v1/images/edits",
        "/v1/completions/render": "/*",
        "/v1/responses/resp_1": "responses",
        "/v1/responses/resp_1/cancel": "responses",
        "/v1/audio/transcriptions": "audio",
        "/v1/score": "score",
    }
    for path, name in names.items():
        found = paths.find(path.encode())
        assert found is not None
        assert found.name == name
    for own in (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/a",
        "/health",
        "/metrics",
        "/ready",
    ):
        assert paths.find(own.encode()) is None


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        ("/v1/messages/count_tokens", "anyway"),
        ("/v1/messages", "itself"),
        ("/v1/audio/*", "anyway"),
        ("/metrics", "itself"),
        ("/v1/models/x", "itself"),
        ("/a/../b", "dots"),
        ("/admin/*", "control"),
    ],
)
def test_a_useless_or_dangerous_entry_is_an_error(listed: str, why: str) -> None:
    what, hint = passthrough_fault(listed)
    assert why in what
    assert hint


def test_every_built_in_path_is_found() -> None:
    assert {PassthroughPaths([]).find(path) for path in BUILT_IN} == set(BUILT_IN.values())


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a; name=model"\r\nContent-Type: audio/wav\r\n\r\n'
    b'\x00\r\n--x\r\n\r\n--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b--\r\n'
)


@pytest.mark.parametrize("parameters", [b"boundary=b", b' charset=utf-8; boundary="b"'])
def test_a_field_of_a_form_is_read(parameters: bytes) -> None:
    form = read_form(b"multipart/form-data", parameters, FORM)
    assert (form.text("model"), form.text("language")) == ("whisper", "")


@given(st.binary(max_size=60), st.integers(0, len(FORM)))
def test_no_bytes_make_the_form_reader_fail(noise: bytes, at: int) -> None:
    """A form is read or refused, and without a field it is one without it."""
    body = FORM[:at] + noise + FORM[at:]
    try:
        form = read_form(b"multipart/form-data", b"boundary=b", body)
    except RequestError:
        pass
    else:
        assert len(form.text("model")) <= len(body)
        rest = read_form(b"multipart/form-data", b"boundary=b", form.without({"model"}))
        assert [field.name for field in rest.fields] == [field.name for field in form.fields if field.name != "model"]
    with suppress(RequestError):
        assert read_form(b"multipart/form-data", noise, FORM).text("model") == "whisper"

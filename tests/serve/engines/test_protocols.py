"""P/D protocols: the client's fields are unchanged in both legs byte for byte, and the added fields are those that
engines expect."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.serve.api.json_fields import ENGINE_FIELDS
from kvroute.serve.api.requests import Completion, read_completion
from kvroute.serve.api.responses import cached_tokens, usage_of
from kvroute.serve.engines.pd_protocol import KvHandshake, KvSource, PdProtocol, ProtocolError
from kvroute.serve.engines.protocols import PROTOCOLS, engine_id
from kvroute.serve.proxy.legs.prefix_copy_leg import copy_body
from kvroute.types import TRAITS, KvProtocol
from kvroute_engine.connector.transfer_params import KvTransferParams, read_transfer_params

COMPLETIONS, CHAT = b"/v1/completions", b"/v1/chat/completions"
HANDSHAKE = KvHandshake(transfer_id="xfer-1", room=2**63 - 2, bootstrap="10.0.0.1:8998", engine_id="engine-a")
REPLY = (
    b'{"id":"1", "kv_transfer_params" : {"do_remote_prefill": true,"remote_block_ids":[[1, 2]],"new":1.0},"usage":null}'
)
PARAMS = b'{"do_remote_prefill": true,"remote_block_ids":[[1, 2]],"new":1.0}'
SET_FOR_PREFILL = {"stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "n"}

NAMES: list[KvProtocol] = ["vllm", "mooncake", "nixl-push", "sglang"]
vllm, mooncake, sglang = PROTOCOLS["vllm"], PROTOCOLS["mooncake"], PROTOCOLS["sglang"]
push = PROTOCOLS["nixl-push"]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@st.composite
def client_bodies(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Draw the path and the body of a request with a KV transfer, with unknown fields and with fields that a leg may
    set."""
    path = draw(st.sampled_from([COMPLETIONS, CHAT]))
    known: dict[str, Any] = {
        "stream": draw(st.none() | st.booleans()),
        "stream_options": {"include_usage": True},
        "max_tokens": draw(st.none() | st.integers(1, 9)),
        "max_completion_tokens": draw(st.none() | st.integers(1, 9)),
        "min_tokens": draw(st.integers(0, 3)),
        "n": draw(st.none() | st.just(1)),
        "kv_transfer_params": {"remote_host": "evil"},
        "bootstrap_host": "evil",
    }
    names = draw(st.sets(st.sampled_from(sorted(known))))
    fields = {name: value for name, value in known.items() if name in names}
    fields |= draw(st.dictionaries(st.text().map("x-".__add__), values, max_size=4))
    fields["prompt" if path == COMPLETIONS else "messages"] = (
        draw(st.text()) if path == COMPLETIONS else [{"role": "user", "content": draw(st.text())}]
    )
    layout = draw(st.sampled_from([None, 1]))
    return path, json.dumps(fields, ensure_ascii=draw(st.booleans()), indent=layout).encode()


def fields_of(body: bytes) -> dict[str, bytes]:
    """Return the top level of a body; fail unless it is valid JSON, also for a second parser, without duplicate
    names."""
    pairs = json.loads(body, object_pairs_hook=lambda pairs: pairs)
    assert len({name for name, _ in pairs}) == len(pairs)
    return {name: bytes(raw) for name, raw in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items()}


def legs(protocol: PdProtocol, completion: Completion) -> tuple[dict[str, bytes], dict[str, bytes]]:
    return (
        fields_of(protocol.prefill_body(completion, HANDSHAKE)),
        fields_of(protocol.decode_body(completion, HANDSHAKE, protocol.transfer_params(REPLY))),
    )


@given(st.sampled_from(NAMES), client_bodies())
def test_fields_that_no_leg_sets_keep_their_bytes(name: KvProtocol, sent: tuple[bytes, bytes]) -> None:
    path, body = sent
    protocol, completion, client = PROTOCOLS[name], read_completion(path, body), fields_of(body)
    prefill, decode = legs(protocol, completion)
    untouched = client.keys() - ENGINE_FIELDS
    assert {field: decode[field] for field in untouched} == {field: client[field] for field in untouched}
    if name != "sglang":  # its engines take the same body
        untouched = untouched - SET_FOR_PREFILL
    assert {field: prefill[field] for field in untouched} == {field: client[field] for field in untouched}
    assert prefill.keys() - client.keys() <= SET_FOR_PREFILL | ENGINE_FIELDS
    assert decode.keys() - client.keys() <= ENGINE_FIELDS
    assert fields_of(protocol.aggregated_body(completion)) == {
        field: client[field] for field in client.keys() - ENGINE_FIELDS
    }


@given(st.sampled_from(NAMES), client_bodies())
def test_kv_transfer_addresses_from_clients_reach_no_engine(name: KvProtocol, sent: tuple[bytes, bytes]) -> None:
    prefill, decode = legs(PROTOCOLS[name], read_completion(*sent))
    for body in (prefill, decode):
        for field in ENGINE_FIELDS & body.keys():
            assert b"evil" not in body[field]


@given(client_bodies(), st.sampled_from(NAMES[:3]))
def test_a_prefill_leg_computes_one_token(sent: tuple[bytes, bytes], name: KvProtocol) -> None:
    path, body = sent
    prefill, _ = legs(PROTOCOLS[name], read_completion(path, body))
    assert (prefill["stream"], prefill["max_tokens"], prefill["min_tokens"]) == (b"false", b"1", b"1")
    assert not {"stream_options", "n"} & prefill.keys()
    expected = b"1" if path == CHAT or b"max_completion_tokens" in body else None
    assert prefill.get("max_completion_tokens") == expected


def completion(**fields: Any) -> Completion:
    return read_completion(COMPLETIONS, json.dumps({"prompt": "hi"} | fields).encode())


def test_vllm_legs_equal_the_captured_ones() -> None:
    sent = completion(max_tokens=9, stream=True)
    prefill, decode = legs(vllm, sent)
    assert json.loads(prefill["kv_transfer_params"]) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert decode["kv_transfer_params"] == PARAMS
    assert (decode["stream"], decode["max_tokens"]) == (b"true", b"9")
    assert not vllm.concurrent_legs


def test_legs_of_an_early_pull_have_the_form_that_the_connector_reads() -> None:
    """Both legs carry the same transfer ID. The decode leg's parameters announce a prompt that is not computed yet,
    until the response of the prefill leg replaces them."""
    handshake = KvHandshake(transfer_id="7f3a", bootstrap="[fd00::1]:7100", early=True, instance="prefill0")
    sent = completion()
    prefill_params = json.loads(vllm.prefill_body(sent, handshake))["kv_transfer_params"]
    assert prefill_params == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "7f3a"}
    decode_params = read_transfer_params(json.loads(vllm.decode_body(sent, handshake, None))["kv_transfer_params"])
    assert isinstance(decode_params, KvTransferParams)
    assert (decode_params.early, decode_params.remote_request_id, decode_params.port(3)) == (True, "7f3a", 7103)
    assert (decode_params.remote_host, decode_params.remote_instance) == ("fd00::1", "prefill0")
    body = vllm.decode_body(sent, handshake, vllm.transfer_params(REPLY))
    assert json.loads(body)["kv_transfer_params"] == json.loads(PARAMS)
    with pytest.raises(ProtocolError, match="not host:port"):
        vllm.decode_body(sent, KvHandshake(transfer_id="a", early=True, instance="prefill0"), None)


@given(client_bodies(), st.booleans(), st.lists(st.integers(0, 2**31), min_size=1), st.none() | st.text(min_size=1))
def test_a_prefix_copy_is_requested_by_tokens_and_fetched_by_the_prefill_leg(
    sent: tuple[bytes, bytes], early: bool, ids: list[int], salt: str | None
) -> None:
    """The first leg carries the fields that separate caches and no other field of the client. The second leg carries
    all parameters of the first response and requests to hold the whole prompt's KV, in the form that the connector
    reads."""
    path, body = sent
    salted = json.dumps({**json.loads(body), "model": "m", **({"cache_salt": salt} if salt else {})}).encode()
    request = read_completion(path, salted)
    copy_fields = json.loads(copy_body(request, ids))
    params = copy_fields.pop("kv_transfer_params")
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    expected_fields = {"prompt": ids, "stream": False, "max_tokens": 1, "min_tokens": 1, "model": "m"}
    assert copy_fields == expected_fields | ({"cache_salt": salt} if salt else {})
    handshake = KvHandshake(transfer_id="7f3a", bootstrap="h:1", early=True) if early else KvHandshake()
    held = HELD_KV.params()
    reply = msgspec.json.encode({"kv_transfer_params": {**held, "new": 1.0, "remote_prefill_cached_tokens": 7}})
    whole = fields_of(vllm.prefill_body(request, handshake, vllm.transfer_params(reply)))
    plain = fields_of(vllm.prefill_body(request, handshake))
    assert whole.keys() == plain.keys()
    assert {name: whole[name] for name in whole.keys() - {"kv_transfer_params"}} == {
        name: plain[name] for name in plain.keys() - {"kv_transfer_params"}
    }
    both = {"do_remote_prefill": True, "do_remote_decode": True} | ({"transfer_id": "7f3a"} if early else {})
    prefill_params = json.loads(whole["kv_transfer_params"])
    assert prefill_params == json.loads(msgspec.json.encode(held)) | {"new": 1.0} | both
    read = read_transfer_params(prefill_params)
    assert isinstance(read, KvTransferParams)
    assert (read.early, read.remote_request_id, read.remote_num_tokens) == (False, "cmpl-1", 32)


HELD_KV = KvTransferParams(
    remote_engine_id="e",
    remote_request_id="cmpl-1",
    remote_host="10.0.0.2",
    remote_port=7100,
    remote_num_tokens=32,
    remote_prompt="digest",
)


def test_mooncake_legs_equal_the_captured_ones() -> None:
    prefill, decode = legs(mooncake, completion())
    assert json.loads(prefill["kv_transfer_params"]) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": "xfer-1",
    }
    assert json.loads(decode["kv_transfer_params"]) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "xfer-1",
        "remote_bootstrap_addr": "http://10.0.0.1:8998",
        "remote_engine_id": "engine-a",
    }
    assert mooncake.transfer_params(b"{}") is None
    with pytest.raises(ProtocolError, match="engine id"):
        mooncake.decode_body(completion(), KvHandshake(transfer_id="x", bootstrap="h:1"), None)


def test_sglang_legs_equal_the_captured_ones() -> None:
    prefill, decode = legs(sglang, completion(stream=True, max_tokens=9))
    assert prefill == decode
    assert (prefill["stream"], prefill["max_tokens"]) == (b"true", b"9")
    assert json.loads(prefill["bootstrap_host"]) == "10.0.0.1"
    assert json.loads(prefill["bootstrap_port"]) == 8998
    assert json.loads(prefill["bootstrap_room"]) == 2**63 - 2
    assert sglang.concurrent_legs


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**63 - 1))
def test_sglang_legs_have_one_room_per_sequence(n: int, prompts: int, room: int) -> None:
    sent = completion(prompt=["a"] * prompts, n=n)
    body = json.loads(sglang.prefill_body(sent, KvHandshake(room=room, bootstrap="[::1]:9")))
    rooms = [body["bootstrap_room"]] if n * prompts == 1 else body["bootstrap_room"]
    assert len(set(rooms)) == n * prompts
    assert rooms[0] == room
    assert all(0 <= room_number < 2**63 for room_number in rooms)
    if n * prompts > 1:
        assert body["bootstrap_host"] == ["[::1]"] * (n * prompts)
        assert body["bootstrap_port"] == [9] * (n * prompts)


@pytest.mark.parametrize("bootstrap", ["", "host", "host:", ":1", "host:x", "host:\u00b2"])
def test_sglang_needs_a_bootstrap_address(bootstrap: str) -> None:
    with pytest.raises(ProtocolError, match="host:port"):
        sglang.prefill_body(completion(), KvHandshake(bootstrap=bootstrap))


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"{}",
        b'{"kv_transfer_params":null}',
        b'{"kv_transfer_params":[1]}',
        b"[1]",
        b"{",
        b'{"a":' + b"[" * 100_000,
    ],
    ids=range(7),
)
def test_vllm_decode_legs_need_the_parameters_of_the_prefill_response(reply: bytes) -> None:
    with pytest.raises(ProtocolError):
        vllm.transfer_params(reply)
    with pytest.raises(ProtocolError):
        vllm.decode_body(completion(), HANDSHAKE, None)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"remote_refetch": True}, True),
        ({"remote_refetch": False}, False),
        ({"remote_refetch": "yes"}, False),
        ({}, False),
    ],
    ids=["held", "not-held", "unclear", "missing"],
)
def test_kv_is_fetched_again_only_if_the_connector_reports_that_it_is_held(
    params: dict[str, object], expected: bool
) -> None:
    reply = json.dumps({"kv_transfer_params": {"do_remote_prefill": True, **params}}).encode()
    transfer_params = vllm.transfer_params(reply)
    assert vllm.allows_refetch(transfer_params) is expected
    assert not any(
        protocol.allows_refetch(given) for protocol in (mooncake, sglang, push) for given in (transfer_params, None)
    )
    assert not vllm.allows_refetch(None)


# NIXL push


NIXL_PARAMS = (
    b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[3]],"remote_engine_id":"e-1",'
    b'"remote_request_id":"cmpl-7-0-1a2b3c4d","remote_host":"10.0.0.1","remote_port":5600,"tp_size":2,'
    b'"dcp_size":1,"pp_size":1,"remote_num_tokens":40,"transfer_mode":"push"}'
)
"""As vLLM 0.32 returns them."""


def test_a_registration_before_the_prefill_has_what_all_requests_share() -> None:
    """The blocks and the token count belong to the request whose response showed the rest."""
    peer = push.peer(msgspec.Raw(NIXL_PARAMS))
    handshake = push.handshake(KvSource("prefill0", "", "", peer), lambda: 5, early=True)
    assert handshake is not None
    body = json.loads(push.decode_body(completion(), handshake, None))
    shared = json.loads(NIXL_PARAMS)
    own = {name: shared.pop(name) for name in ("remote_block_ids", "remote_num_tokens", "remote_request_id")}
    assert body["kv_transfer_params"].pop("remote_request_id") not in ("", own["remote_request_id"])
    assert body["kv_transfer_params"] == shared


@pytest.mark.parametrize("name", ["remote_engine_id", "remote_host", "remote_port", "tp_size"])
def test_an_address_that_lacks_a_part_is_named(name: str) -> None:
    params = {key: value for key, value in json.loads(NIXL_PARAMS).items() if key != name}
    with pytest.raises(ProtocolError, match=f"without {name}"):
        push.peer(msgspec.Raw(json.dumps(params).encode()))


def test_without_an_address_a_decode_leg_needs_the_prefill_response() -> None:
    handshake = push.handshake(KvSource("prefill0", "", ""), lambda: 5, early=True)
    assert handshake is not None
    with pytest.raises(ProtocolError, match="no transfer parameters"):
        push.decode_body(completion(), handshake, None)
    body = push.decode_body(completion(), handshake, msgspec.Raw(NIXL_PARAMS))
    assert fields_of(body)["kv_transfer_params"] == NIXL_PARAMS


def test_every_protocol_has_traits_and_a_class() -> None:
    assert set(TRAITS) == set(PROTOCOLS) == set(get_args(KvProtocol))
    assert all(protocol.concurrent_legs == TRAITS[name].concurrent_legs for name, protocol in PROTOCOLS.items())
    assert all(protocol.returns_params == TRAITS[name].returns_params for name, protocol in PROTOCOLS.items())


def test_one_instance_serves_what_a_protocol_cannot_split() -> None:
    assert [TRAITS[name].splits_every_request for name in ("vllm", "mooncake", "sglang")] == [False, False, True]
    assert b'"n":2' in vllm.aggregated_body(completion(n=2))


@pytest.mark.parametrize("tokens", ["-1", "9" * 20, "9" * 400, "9" * 5000, str(2**31)])
def test_a_number_of_tokens_that_no_engine_has_counts_as_not_reported(tokens: str) -> None:
    """A larger number would overflow in the counter."""
    assert usage_of(f'{{"usage":{{"completion_tokens":{tokens}}}}}'.encode()) is None
    assert cached_tokens(f'{{"usage":{{"prompt_tokens_details":{{"cached_tokens":{tokens}}}}}}}'.encode()) is None
    assert cached_tokens(f'{{"kv_transfer_params":{{"remote_prefill_cached_tokens":{tokens}}}}}'.encode()) is None


def test_a_rank_with_too_many_digits_is_sorted_last() -> None:
    assert engine_id(f'{{"{"1" * 5000}":{{"engine_id":"a"}},"2":{{"engine_id":"c"}}}}'.encode()) == "c"


def test_the_engine_id_of_a_data_parallel_rank() -> None:
    """A rank that is not registered has none; that of another rank would be wrong."""
    reply = b'{"0":{"engine_id":"e_dp0"},"1":{"engine_id":"e_dp1"},"10":{"engine_id":"e_dp10"}}'
    assert [engine_id(reply, rank) for rank in (0, 1, 10)] == ["e_dp0", "e_dp1", "e_dp10"]
    with pytest.raises(ProtocolError, match="data-parallel rank 2 is not registered"):
        engine_id(reply, 2)


def test_the_engine_id_is_that_of_the_first_rank() -> None:
    assert engine_id(b'{"10":{"engine_id":"k"},"2":{"engine_id":"c","worker_addr":{"0":{}}}}') == "c"
    for reply in (b"{}", b"[]", b'{"0":{}}', b"x", b'{"0":1}', b"\xff"):
        with pytest.raises(ProtocolError):
            engine_id(reply)

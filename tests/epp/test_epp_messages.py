"""Messages of the picker: laws on what comes from Envoy and what goes back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from kvroute.epp.addresses import address_of, host_of, port_of
from kvroute.epp.envoy_call import header_changes
from kvroute.epp.envoy_pb2 import Metadata, ProcessingRequest
from kvroute.epp.messages import (
    NAMESPACE,
    PIECE_BYTES,
    SERVED,
    SUBSET,
    SUBSET_NAMESPACE,
    body_pieces,
    served_of,
    subset_of,
)
from kvroute.http.headers import Headers, header_lines

ROOT = Path(__file__).resolve().parents[2]
NAMES = st.text("abc0123456789.:[]", min_size=1, max_size=8)
HEADERS = st.lists(
    st.tuples(
        st.sampled_from([b"accept", b"authorization", b"cookie", b"x-forwarded-for", b"x-request-id", b"x-tenant"]),
        st.sampled_from([b"a", b"b: c", b""]),
    ),
    max_size=6,
    unique_by=lambda header: header[0],
)


def with_metadata(namespace: str, **fields: object) -> ProcessingRequest:
    """Return a message with metadata."""
    inner = struct_pb2.Struct()
    inner.update(fields)
    return ProcessingRequest(metadata_context=Metadata(filter_metadata={namespace: inner}))


@given(st.lists(st.lists(NAMES, min_size=1, max_size=3), max_size=4))
def test_a_list_and_comma_separated_text_are_the_same_subset(groups: list[list[str]]) -> None:
    """An entry of the list may itself be comma-separated."""
    names = frozenset(name for group in groups for name in group)
    entries = [" , ".join(group) for group in groups]
    assert subset_of(with_metadata(SUBSET_NAMESPACE, **{SUBSET: entries})) == names
    assert subset_of(with_metadata(SUBSET_NAMESPACE, **{SUBSET: ",".join(entries)})) == names


def test_no_subset_is_not_an_empty_one() -> None:
    """Without the key there is no restriction; any other value restricts to nothing."""
    assert subset_of(ProcessingRequest()) is None
    assert subset_of(with_metadata(SUBSET_NAMESPACE, other="x")) is None
    assert subset_of(with_metadata(SUBSET_NAMESPACE, **{SUBSET: 17})) == frozenset()


def test_the_served_endpoint_is_empty_if_there_is_none() -> None:
    """Envoy writes `-` for an address that does not exist."""
    assert served_of(with_metadata(NAMESPACE, **{SERVED: "10.0.0.1:80"})) == "10.0.0.1:80"
    assert served_of(with_metadata(NAMESPACE, **{SERVED: "-"})) == served_of(ProcessingRequest()) == ""


@given(st.integers(0, 3 * PIECE_BYTES), st.booleans())
def test_pieces_are_the_body_and_only_the_last_one_ends_it(size: int, ends: bool) -> None:
    """Each is below the 64 KiB at which Envoy splits messages."""
    body = bytes(size)
    pieces = [piece.response.body_mutation.streamed_response for piece in body_pieces(body, ends=ends)]
    assert b"".join(piece.body for piece in pieces) == body
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [ends]
    assert all(len(piece.body) <= PIECE_BYTES for piece in pieces)


@given(HEADERS, HEADERS)
def test_header_changes_turn_the_clients_headers_into_those_for_the_engine(client: Headers, sent: Headers) -> None:
    """Headers of Envoy's own are left alone."""
    added, removed = header_changes(client, header_lines(sent))
    result = {name: value for name, value in client if name not in removed} | dict(added)
    kept = {name: value for name, value in client if name.startswith((b"x-forwarded-", b"x-request-id"))}
    assert result == kept | dict(sent)


@given(st.ip_addresses(), st.integers(1, 65535))
def test_an_address_has_the_ip_and_the_port_of_its_url(ip: object, port: int) -> None:
    """IPv6 is in brackets."""
    host = f"[{ip}]" if ":" in str(ip) else str(ip)
    address = address_of(f"http://{host}:{port}")
    assert (address, host_of(address), port_of(address)) == (f"{host}:{port}", str(ip), port)


@pytest.mark.parametrize("url", ["http://engine:8000", "https://10.0.0.1", "10.0.0.1:80"])
def test_envoy_has_no_address_for_host_names_and_tls(url: str) -> None:
    """The picker says so at its start."""
    assert address_of(url) == ""
    assert address_of("http://10.0.0.1") == "10.0.0.1:80"


@pytest.mark.parametrize("name", ["envoy_pb2.py", "envoy_pb2.pyi"])
def test_generated_code_is_that_of_envoys_proto_file(tmp_path: Path, name: str) -> None:
    """`make protos` writes it again."""
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "src", f"--python_out={tmp_path}"]
    command += [f"--pyi_out={tmp_path}", "src/kvroute/epp/envoy.proto"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kvroute/epp" / name).read_text() == (ROOT / "src/kvroute/epp" / name).read_text()

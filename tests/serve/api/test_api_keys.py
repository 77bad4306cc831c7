"""API keys: only the right key is accepted, and no error message repeats the key received."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvroute.cli.inspect.keys import app
from kvroute.serve.api.api_keys import Keys, KeySettings, hash_text, new_key, read_key_file
from kvroute.types import InputError, InputErrors

drawn = st.binary(min_size=32, max_size=32)


@given(st.lists(drawn, min_size=1, max_size=6, unique=True), drawn, st.data())
def test_each_key_gives_its_name_and_other_keys_are_rejected(
    random: list[bytes], other_bytes: bytes, data: st.DataObject
) -> None:
    """The result of a check does not depend on the order or the number of earlier checks."""
    made = {f"client{index}": new_key(secret) for index, secret in enumerate(random)}
    keys = Keys({name: hashed for name, (_, hashed) in made.items()})
    for name in data.draw(st.lists(st.sampled_from(sorted(made)), max_size=12)):
        assert keys.name_of(f"Bearer {made[name][0]}".encode()) == name
        other, hashed = new_key(other_bytes)
        known = next((name for name, (_, known) in made.items() if known == hashed), None)
        assert keys.name_of(f"Bearer {other}".encode()) == known


@given(st.binary(max_size=80) | st.text(max_size=40).map(lambda text: f"Bearer {text}".encode()))
def test_similar_keys_and_hashes_are_rejected(header: bytes) -> None:
    key, hashed = new_key(bytes(32))
    keys = Keys({"alice": hashed})
    assert keys.name_of(header) is None
    assert keys.name_of(hashed.encode()) is None
    assert keys.name_of(f"Bearer {hashed}".encode()) is None, "the hash in the file is not a key"
    assert keys.name_of(f"Bearer {key}x".encode()) is None
    assert keys.name_of(f"Bearer {key[:-1]}".encode()) is None


@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER  {}", " Bearer {} "])
def test_the_authorization_scheme_is_parsed_as_http_specifies(form: str) -> None:
    key, hashed = new_key(b"k" * 32)
    assert Keys({"alice": hashed}).name_of(form.format(key).encode()) == "alice"


@pytest.mark.parametrize("header", [None, b"", b"Bearer", b"Bearer ", b"Basic {}", b"Bearer " + b"x" * 5000])
def test_other_authorization_headers_are_rejected(header: bytes | None) -> None:
    assert Keys({"alice": hash_text("key")}).name_of(header) is None


def test_a_key_has_256_bits_and_its_hash_is_sha256() -> None:
    key, hashed = new_key(bytes(range(32)))
    assert key == "kvr_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
    assert hash_text("abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2
    assert hashed == hash_text(key)


def test_keys_of_settings_and_file_are_combined(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# clients\nalice: {hash_text('a')}\nbob: {hash_text('b')}\n", encoding="utf-8")
    keys = Keys.of(KeySettings(file=str(path), known={"carol": hash_text("c")}))
    assert (keys.names, keys.required) == (("carol", "alice", "bob"), True)
    assert [keys.name_of(f"Bearer {key}".encode()) for key in "abcd"] == ["alice", "bob", "carol", None]
    assert not Keys.of(KeySettings()).required
    with pytest.raises(InputError, match="'alice' is also in `known`"):
        Keys.of(KeySettings(file=str(path), known={"alice": hash_text("x")}))


SECRET = "kvr_c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LTEyMzQ"


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        pytest.param(f"alice: {hash_text('a')}\nbob: {SECRET}\n", 2, "the value does not fit", id="the key itself"),
        pytest.param(f"alice: sha256:{SECRET}\n", 1, "kvroute key new", id="not a hash"),
        pytest.param(f"alice: {{hash: {SECRET}}}\n", 1, "the value does not fit", id="a mapping"),
        pytest.param(f"alice: [{SECRET}]\n", 1, "the value does not fit", id="a list"),
        pytest.param("alice: 123456789\n", 1, "the value does not fit", id="a number"),
        pytest.param(f"\nal ice: {hash_text('a')}\n", 2, "letters, digits", id="a bad name"),
        pytest.param(f"a: {hash_text('a')}\na: {hash_text('b')}\n", 2, "is defined twice", id="a name twice"),
        pytest.param("# none\n", 1, "the file is empty; begin with a line", id="empty"),
        pytest.param(f"- {SECRET}\n", 1, "not a mapping", id="no mapping"),
        pytest.param(f"a: {hash_text('a').upper()}\n", 1, "the value does not fit", id="upper case"),
    ],
)
def test_errors_of_a_key_file_give_the_line_and_not_its_content(
    tmp_path: Path, text: str, line: int, sentence: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputErrors) as caught:
        read_key_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}")
    assert sentence in message
    assert "c2VjcmV0" not in message
    assert "123456789" not in message


def test_an_empty_or_missing_key_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("{}\n", encoding="utf-8")
    with pytest.raises(InputError, match="has no key"):
        Keys.of(KeySettings(file=str(path)))
    with pytest.raises(InputError, match="cannot be read"):
        Keys.of(KeySettings(file=str(tmp_path / "nothing")))


def test_the_command_prints_a_key_and_its_line_for_the_file(tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["new", "alice"]).output
    (key,) = re.findall(r"^ +(kvr_\S+)$", printed, re.M)
    (line,) = re.findall(r"^ +(alice: .*)$", printed, re.M)
    path = tmp_path / "keys"
    path.write_text(line + "\n", encoding="utf-8")
    assert Keys.of(KeySettings(file=str(path))).name_of(f"Bearer {key}".encode()) == "alice"
    assert printed.count(key) == 1


def test_new_keys_differ_and_json_output_is_one_document() -> None:
    documents = [msgspec.json.decode(CliRunner().invoke(app, ["new", "a", "--json"]).stdout) for _ in range(2)]
    assert documents[0]["key"] != documents[1]["key"]
    assert all(hash_text(document["key"]) == document["hash"] for document in documents)


def test_the_command_rejects_names_that_a_key_file_cannot_contain() -> None:
    result = CliRunner().invoke(app, ["new", "al ice"])
    assert isinstance(result.exception, InputError)
    assert "'al ice' is not a valid key name" in str(result.exception)

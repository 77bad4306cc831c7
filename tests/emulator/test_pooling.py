"""Requests that generate no text, or text from audio: the formats are vLLM's, and the numbers follow from the input."""

from __future__ import annotations

import io
import wave
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.emulator.test_emulator import MODEL, Client, on_fleet

from kvroute.emulator import EmulatedClusterSpec

QUIET = EmulatedClusterSpec(kv_events=False)


def test_embeddings_are_the_same_in_both_encodings() -> None:
    """The SDK asks for base64 unless told otherwise; `dimensions` sets the number of values."""
    import openai

    async def check(client: Client) -> None:
        async with openai.AsyncOpenAI(base_url=client.endpoint("decode0").url + "/v1", api_key="none") as api:
            packed = await api.embeddings.create(model=MODEL, input=["hi", "ho"])
            listed = await api.embeddings.create(model=MODEL, input=["hi", "ho"], encoding_format="float")
            for first, other in zip(packed.data, listed.data, strict=True):
                assert first.embedding == pytest.approx(other.embedding)
                assert sum(value * value for value in first.embedding) == pytest.approx(1.0, rel=1e-5)
            assert packed.data[0].embedding != packed.data[1].embedding
            short = await api.embeddings.create(model=MODEL, input="hi", dimensions=3)
            assert len(short.data[0].embedding) == 3
            ratio = [
                first / other for first, other in zip(short.data[0].embedding, packed.data[0].embedding, strict=False)
            ]
            assert ratio == pytest.approx([ratio[0]] * 3, rel=1e-4), "the direction of the first values"
        said = await client.post_json("decode0", {"messages": [{"role": "user", "content": "hi"}]}, "/v1/embeddings")
        assert len(said["data"][0]["embedding"]) == 8
        pooled = await client.post_json("decode0", {"input": "hi"}, "/pooling")
        assert (pooled["data"][0]["object"], pooled["data"][0]["data"]) == ("pooling", listed.data[0].embedding)
        classified = await client.post_json("decode0", {"input": ["hi", "ho"]}, "/classify")
        for entry in classified["data"]:
            assert sum(entry["probs"]) == pytest.approx(1.0)
            assert (entry["num_classes"], entry["label"]) == (2, f"LABEL_{entry['probs'].index(max(entry['probs']))}")

    on_fleet(check, settings=QUIET)


def test_equal_texts_are_the_most_relevant() -> None:
    async def check(client: Client) -> None:
        documents = ["a cat", "a dog", "a fish"]
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            ranked = await client.post_json("decode0", {"query": "a dog", "documents": documents, "top_n": 2}, path)
            values = [entry["relevance_score"] for entry in ranked["results"]]
            assert (ranked["results"][0]["index"], ranked["results"][0]["document"]["text"]) == (1, "a dog")
            assert (len(values), values) == (2, sorted(values, reverse=True))
        for path in ("/score", "/v1/score"):
            scored = await client.post_json("decode0", {"text_1": "a dog", "text_2": documents}, path)
            best = max(scored["data"], key=lambda entry: float(entry["score"]))
            assert (best["index"], best["score"]) == (1, values[0])
        pairs = await client.post_json("decode0", {"queries": ["a", "b"], "documents": ["a", "c"]}, "/score")
        assert [entry["object"] for entry in pairs["data"]] == ["score", "score"]

    on_fleet(check, settings=QUIET)


def test_tokens_become_the_text_again() -> None:
    async def check(client: Client) -> None:
        text = "What is é? " * 3
        found = await client.post_json("decode0", {"prompt": text, "return_token_strs": True}, "/tokenize")
        assert len(found["token_strs"]) == found["count"]
        assert await client.post_json("decode0", {"tokens": found["tokens"]}, "/detokenize") == {"prompt": text}
        body = {"model": MODEL, "prompt": text, "max_tokens": 5, "return_token_ids": True}
        for more in ({}, {"structured_outputs": {"choice": ["ééé"]}}):
            choice = (await client.post_json("decode0", body | more))["choices"][0]
            said = await client.post_json("decode0", {"tokens": choice["token_ids"]}, "/detokenize")
            assert said["prompt"] == choice["text"]

    on_fleet(check, settings=QUIET)


def sound(seconds: int) -> bytes:
    """Return a WAV file of silence."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(1)
        audio.setframerate(100)
        audio.writeframes(bytes(100 * seconds))
    return buffer.getvalue()


def test_audio_is_transcribed() -> None:
    import openai

    async def check(client: Client) -> None:
        url = client.endpoint("decode0").url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as api:
            whole: Any = await api.audio.transcriptions.create(model=MODEL, file=("a.wav", sound(3)))
            again: Any = await api.audio.transcriptions.create(
                model=MODEL, file=("b.wav", sound(3)), response_format="verbose_json"
            )
        assert (whole.usage.seconds, float(again.duration)) == (3, 3.0)
        assert whole.text == again.text == again.segments[0].text
        form = aiohttp.FormData()
        form.add_field("file", sound(3), filename="a.wav")
        async with client.session.post(f"{url}/audio/translations", data=form) as response:
            assert (await response.json())["text"] not in ("", whole.text)
        form = aiohttp.FormData({"model": MODEL, "stream": "true"})
        form.add_field("file", sound(3), filename="a.wav")
        async with client.session.post(f"{url}/audio/transcriptions", data=form) as response:
            lines = [line for line in (await response.read()).split(b"\n") if line.startswith(b"data: {")]
        chunks = [msgspec.json.decode(line[6:]) for line in lines]
        assert {chunk["object"] for chunk in chunks} == {"transcription.chunk"}
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks).strip() == whole.text

    on_fleet(check, settings=QUIET)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {}, "prompt"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, None),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/detokenize", {"tokens": ["a"]}, None),
        ("/v1/audio/transcriptions", {"file": "a"}, "file"),
    ],
)
def test_other_bodies_are_refused(path: str, body: dict[str, Any], param: str | None) -> None:
    async def check(client: Client) -> None:
        status, data = await client.post("decode0", path, body)
        assert (status, msgspec.json.decode(data)["error"]["param"]) == (400, param)
        status, _ = await client.post("decode0", "/v1/embeddings", {"model": "unknown", "input": "a"})
        assert status == 404

    on_fleet(check, settings=QUIET)

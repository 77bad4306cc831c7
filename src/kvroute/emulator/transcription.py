"""Transcriptions and translations of audio. The text follows from the bytes of the file."""

from __future__ import annotations

import io
import math
import wave
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash
from aiohttp import web

from kvroute.emulator.errors import ApiError

BYTES_PER_S = 16_000.0
"""Assumed rate of audio that is not in WAV format."""
FORMATS = ("json", "text", "verbose_json")


@dataclass(frozen=True, slots=True)
class Audio:
    """One request: the JSON body of the request for its text, and what the response needs."""

    body: bytes
    duration_s: float
    language: str
    verbose: bool

    def document(self, text: str, tokens: list[int]) -> dict[str, Any]:
        """Return the response. Args: `text` and `tokens` of the answer."""
        text = text.strip()
        if not self.verbose:
            return {"text": text, "usage": {"type": "duration", "seconds": math.ceil(self.duration_s)}}
        segment = {"id": 0, "seek": 0, "start": 0.0, "end": self.duration_s, "text": text, "tokens": tokens}
        segment |= {"temperature": 0.0, "avg_logprob": -0.3, "compression_ratio": 1.0, "no_speech_prob": None}
        found = {"duration": self.duration_s, "language": self.language, "text": text}
        return {**found, "segments": [segment], "words": None}


async def read_audio(request: web.BaseRequest) -> Audio:
    """Read a form with a file.

    Raises:
        ApiError: no form, no file, or a field with a wrong value.
    """
    if not request.content_type.startswith("multipart/"):
        raise ApiError("the body is no form; send multipart/form-data with a file", param="file")
    try:
        form = await request.post()
    except ValueError as error:
        raise ApiError(f"the form cannot be read: {error}") from None
    file = form.get("file")
    if not isinstance(file, web.FileField):
        raise ApiError("file is missing; send an audio file", param="file")
    data = file.file.read()
    texts = {name: value for name, value in form.items() if isinstance(value, str)}
    chosen = texts.get("response_format", "json")
    if chosen not in FORMATS:
        raise ApiError(f"response_format is {chosen!r}; give {', '.join(FORMATS)}", param="response_format")
    prompt = [request.path, xxhash.xxh64_hexdigest(data), texts.get("language", ""), texts.get("prompt", "")]
    fields: dict[str, Any] = {"prompt": "\n".join(prompt), "stream": texts.get("stream") in ("true", "True", "1")}
    fields["stream_options"] = {"include_usage": texts.get("stream_include_usage") in ("true", "True", "1")}
    if "model" in texts:
        fields["model"] = texts["model"]
    if texts.get("max_completion_tokens", "").isdecimal():
        fields["max_completion_tokens"] = int(texts["max_completion_tokens"])
    language = texts.get("language") or "en"
    return Audio(msgspec.json.encode(fields), _duration_s(data), language, chosen == "verbose_json")


def _duration_s(data: bytes) -> float:
    try:
        with wave.open(io.BytesIO(data)) as audio:
            return float(audio.getnframes() / (audio.getframerate() or 1))
    except (wave.Error, EOFError):
        return len(data) / BYTES_PER_S

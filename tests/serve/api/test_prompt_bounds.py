"""A prompt that is too long is rejected before it is tokenized, and no prompt that fits is rejected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.rig import CHAT, COMPLETIONS, rig
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers

from kvroute.serve.api.json_fields import RequestError
from kvroute.serve.api.prompt import Prompts
from kvroute.serve.api.prompt_bounds import (
    JSON_EXPANSION,
    PromptBounds,
    context_of,
    longest_token_bytes,
)
from kvroute.serve.api.prompt_queue import LANE_LIMITS
from kvroute.serve.api.prompt_reader import Prompt
from kvroute.serve.api.requests import Completion, read_completion

TEMPLATE = "{{ preamble }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
TEXT = "the network moves blocks of the cache; Grüße aus Ulm, 世界          "
CONTEXT = 100


def make_tokenizer(**changes: Any) -> tokenizers.Tokenizer:
    """Return the file of a byte-level tokenizer with `changes` of its parts."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT * 20], trainer)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bounds")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": CONTEXT}))
    return folder


@pytest.fixture(scope="module")
def prompts(folder: Path) -> Iterator[Prompts]:
    prompts = Prompts(folder)
    yield prompts
    prompts.close()


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def plain(prompt: object, **fields: Any) -> Completion:
    return read_completion(COMPLETIONS.encode(), json.dumps({"prompt": prompt} | fields).encode())


def chat(content: str, **fields: Any) -> Completion:
    messages = [{"role": "user", "content": content}]
    return read_completion(CHAT.encode(), json.dumps({"messages": messages} | fields).encode())


def refusal(prompts: Prompts, completion: Completion) -> RequestError:
    def read() -> Prompt:
        return prompts.blocks_now(completion) or asyncio.run(prompts.blocks(completion))

    with pytest.raises(RequestError) as refused:
        read()
    assert refused.value.status == 400
    return refused.value


@given(text=st.text() | st.text(alphabet=" ") | st.text(alphabet=TEXT, min_size=50))
def test_no_token_has_more_bytes_than_the_bound(text: str, folder: Path, loaded: tokenizers.Tokenizer) -> None:
    """A text of more than `context * bound` bytes therefore never fits into the context."""
    longest = longest_token_bytes(folder / "tokenizer.json")
    assert longest is not None
    assert len(text.encode()) <= longest * len(loaded.encode(text).ids)


@given(text=st.text(alphabet=TEXT, max_size=400), chats=st.booleans())
def test_a_prompt_is_rejected_if_and_only_if_it_exceeds_the_context(
    text: str, chats: bool, prompts: Prompts, loaded: tokenizers.Tokenizer
) -> None:
    tokens = len(loaded.encode(f"<user>{text}" if chats else text).ids)
    completion = chat(text) if chats else plain(text)
    if tokens <= CONTEXT:
        sized = prompts.blocks_now(completion)
        assert sized is not None
        assert sized.input_tokens == max(1, tokens)
    else:
        error = refusal(prompts, completion)
        assert error.code == "context_length_exceeded"
        assert error.param == ("messages" if chats else "prompt")
        assert f"{tokens} tokens" in error.message


@pytest.mark.parametrize("where", ["prompt", "messages", "chat_template_kwargs", "tools"])
def test_a_text_that_cannot_fit_is_rejected_before_it_is_tokenized(folder: Path, where: str) -> None:
    """The message counts bytes; after tokenizing it would count tokens."""
    (folder / "tools").mkdir(exist_ok=True)
    for name in ("tokenizer.json", "config.json"):
        (folder / "tools" / name).write_bytes((folder / name).read_bytes())
    (folder / "tools" / "chat_template.jinja").write_text("{{ tools }}" + TEMPLATE)
    prompts = Prompts(folder / "tools")
    long = "word " * 100_000
    completions = {
        "prompt": lambda: plain(long),
        "messages": lambda: chat(long),
        "chat_template_kwargs": lambda: chat("hi", chat_template_kwargs={"preamble": long}),
        "tools": lambda: chat("hi", tools=[{"name": long}]),
    }
    error = refusal(prompts, completions[where]())
    assert error.code == "context_length_exceeded"
    assert "bytes long" in error.message
    prompts.close()


def test_token_ids_are_counted_with_and_without_a_tokenizer(folder: Path, prompts: Prompts) -> None:
    rough = Prompts(context_tokens=CONTEXT)
    for reader in (prompts, rough):
        sized = reader.blocks_now(plain([1] * CONTEXT))
        assert sized is not None
        assert sized.input_tokens == CONTEXT
        assert refusal(reader, plain([1] * (CONTEXT + 1))).code == "context_length_exceeded"
        assert refusal(reader, plain([1] * 100_000)).code == "context_length_exceeded"
    rough.close()


def test_a_prompt_that_the_engine_truncates_is_not_rejected(prompts: Prompts) -> None:
    sized = prompts.blocks_now(plain("word " * 500, truncate_prompt_tokens=50))
    assert sized is not None
    assert sized.input_tokens > CONTEXT
    assert refusal(prompts, plain("word " * 500, truncate_prompt_tokens=None)).code == "context_length_exceeded"


def test_memory_limits_the_text_if_the_context_is_unknown(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content[:5] }}")
    prompts = Prompts(tmp_path, memory_bytes=100e6)
    most = PromptBounds(memory_bytes=100e6).text_bytes
    error = refusal(prompts, plain("a" * (most + 1)))
    assert error.code == "prompt_too_large"
    assert "gateway.prompt.memory" in error.message
    assert asyncio.run(prompts.blocks(chat("a" * (2 * most)))).input_tokens == 5, "the template leaves most of it out"
    assert refusal(prompts, chat("a" * JSON_EXPANSION * most)).code == "prompt_too_large"
    prompts.close()
    rough = Prompts(memory_bytes=100e6)
    assert asyncio.run(rough.blocks(plain("a" * (most + 1)))).input_tokens == -(-(most + 1) // 4)
    rough.close()


@given(st.floats(100e6, 1e12))
def test_all_lanes_together_stay_within_the_memory_limit(memory_bytes: float) -> None:
    longest = PromptBounds(memory_bytes=memory_bytes).text_bytes
    assert longest > 0
    assert 350 * sum(min(limit, longest) for limit in LANE_LIMITS) <= memory_bytes * (1 + 1e-9)


def test_further_prompts_beyond_the_memory_limit_are_counted_by_bytes(folder: Path) -> None:
    prompts = Prompts(folder, context_tokens=10**9, memory_bytes=100e6)
    half = "a " * (PromptBounds(memory_bytes=100e6).text_bytes // 4)
    one = asyncio.run(prompts.blocks(plain(half))).input_tokens
    several = asyncio.run(prompts.blocks(plain([half] * 4))).input_tokens
    assert several == 2 * one + 2 * -(-len(half) // 4)
    prompts.close()


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 8192, "rope_scaling": {"factor": 4.0}}, 32_768),
        ({"max_position_embeddings": 8192, "rope_scaling": None}, 8192),
        ({"rope_scaling": {"factor": 4, "original_max_position_embeddings": 4096}}, 16_384),
        ({"rope_parameters": {"rope_type": "default"}, "max_position_embeddings": 7}, 7),
        ({"max_position_embeddings": "many"}, None),
        ({}, None),
        ([], None),
    ],
    ids=range(10),
)
def test_the_context_is_read_from_the_model_s_configuration(
    tmp_path: Path, config: object, context: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_of(tmp_path) == context


def test_without_a_model_configuration_the_context_is_unknown(tmp_path: Path) -> None:
    assert context_of(tmp_path) is None


def no_bound(tmp_path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert longest_token_bytes(tmp_path / "tokenizer.json") is None


def test_no_bound_is_derived_if_the_tokenizer_may_drop_text(tmp_path: Path) -> None:
    no_bound(tmp_path, make_tokenizer(normalizer=normalizers.Strip()))
    no_bound(tmp_path, make_tokenizer(normalizer=normalizers.Replace("   ", " ")))
    no_bound(tmp_path, make_tokenizer(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed")])))
    no_bound(tmp_path, make_tokenizer(pre_tokenizer=pre_tokenizers.WhitespaceSplit()))
    no_bound(tmp_path, tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    small = tokenizers.Tokenizer(models.BPE({"a": 0}, [], unk_token="a", fuse_unk=True))
    small.pre_tokenizer = pre_tokenizers.ByteLevel()
    no_bound(tmp_path, small)
    stripping = make_tokenizer()
    stripping.add_special_tokens([AddedToken("<|user|>", rstrip=True)])
    no_bound(tmp_path, stripping)
    assert longest_token_bytes(tmp_path / "none.json") is None


@given(text=st.text())
def test_the_bound_holds_with_unicode_composition(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "composing"
    folder.mkdir(exist_ok=True)
    composing = make_tokenizer(normalizer=normalizers.Sequence([normalizers.NFC()]))
    composing.save(str(folder / "tokenizer.json"))
    longest = longest_token_bytes(folder / "tokenizer.json")
    plain_longest = max(len(token) for token in composing.get_vocab())
    assert longest == 3 * plain_longest
    jamo = "".join(chr(code) for code in (0x1112, 0x1161, 0x11AB)) * 50 + text
    assert len(jamo.encode()) <= longest * len(composing.encode(jamo).ids)


def test_the_error_gives_the_limit_that_was_exceeded(folder: Path) -> None:
    """Through a whole gateway; the engines receive nothing."""

    async def main() -> None:
        section = f"  prompt: {{tokenizer: {folder}, context: 100}}\n"
        async with rig(section) as gate:
            for body, path, param in (
                ({"prompt": "word " * 100_000, "model": "llama-3-70b"}, COMPLETIONS, "prompt"),
                ({"messages": [{"role": "user", "content": "word " * 400}]}, CHAT, "messages"),
            ):
                response = await gate.post(body, path)
                assert response.status == 400
                assert response.json["error"]["code"] == "context_length_exceeded"
                assert response.json["error"]["param"] == param
            assert (await gate.ask("word", tokens=1)).status == 200
            assert await gate.becomes_idle()

    asyncio.run(main())

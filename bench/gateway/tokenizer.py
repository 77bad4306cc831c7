"""A small byte-level BPE tokenizer created on the spot as a tokenizer.json, to measure the cost of tokens offline."""

from __future__ import annotations

import json
from pathlib import Path

from bench.gateway.load import Plan, bodies
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 2_000


def write_tokenizer(path: Path) -> None:
    """Train the tokenizer on the load's own prompts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    texts = [json.loads(body)["messages"][0]["content"] for body in bodies(Plan())[:64]]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))

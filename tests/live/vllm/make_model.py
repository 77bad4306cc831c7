"""Creates a tiny Llama with random weights and a byte-level BPE tokenizer: `make_model FOLDER [WIDTH LAYERS]`.

Runs in vLLM's environment. The result is equal on every run, because the seed is fixed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch  # type: ignore[import-not-found]
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # type: ignore[import-not-found]

WIDTH, LAYERS = 256, 4
TEXT = [
    "the quick brown fox jumps over the lazy dog. " * 5,
    "network aware control plane for prefill decode disaggregated inference. " * 5,
    "".join(chr(code) for code in range(32, 127)),
]
CHAT_TEMPLATE = (
    "{% if reasoning_effort %}effort: {{ reasoning_effort }}\n{% endif %}"
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {% if m['reasoning'] %}({{ m['reasoning'] }}){% endif %}{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %} {{ call['function']['name'] }}{{ call['function']['arguments'] | tojson }}"
    "{% endfor %}\n{% endfor %}assistant: "
)


def save_tokenizer(folder: str) -> int:
    """Train on a few lines; return the vocabulary size, rounded up to a size that kernels support well."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return -(-tokenizer.get_vocab_size() // 64) * 64


def config_of(vocabulary: int, width: int = WIDTH, layers: int = LAYERS) -> Any:
    """Return the configuration of a model. Args: `width` is a multiple of 128."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        # Wide, so that the logits are peaked and greedy tokens do not depend on the last bit.
        initializer_range=0.2,
    )


def save_model(folder: str, vocabulary: int, *sizes: int) -> None:
    """Save a model in bfloat16; by default it has 2.6 million parameters. Args: see `config_of`."""
    torch.manual_seed(0)
    LlamaForCausalLM(config_of(vocabulary, *sizes)).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    save_model(sys.argv[1], save_tokenizer(sys.argv[1]), *map(int, sys.argv[2:]))

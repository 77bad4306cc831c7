"""Creates a tiny vision model with random weights and the tokenizer of `make_model`: `make_vision_model FOLDER`.

Runs in vLLM's environment. It is an Idefics3: of the models in vLLM whose modules do not import torchvision, this one
has a text model like the tiny one, and its image processor is part of transformers. A picture has 64 x 64 pixels and
becomes four tokens between three special ones.
"""

from __future__ import annotations

import sys

import torch  # type: ignore[import-not-found]
from tests.live.vllm.make_model import config_of, save_tokenizer
from transformers import (  # type: ignore[import-not-found]
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
)

PIXELS, PATCH, SCALE = 64, 16, 2
"""Pixels of a side, pixels of a patch, and patches of a side of one token."""
SPECIAL = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] in ('image', 'image_url') %}<image>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}assistant: "
)


def save_vision_model(folder: str) -> None:
    """Save model, tokenizer and processor."""
    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": PIXELS,
        "patch_size": PATCH,
        "initializer_range": 0.2,
    }
    config = Idefics3Config(
        vision_config=vision,
        text_config=config_of(-(-len(tokenizer) // 64) * 64),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=SCALE,
        tie_word_embeddings=False,
        pad_token_id=2,
    )
    Idefics3ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    side = {"longest_edge": PIXELS}
    images = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    tokens = (PIXELS // PATCH // SCALE) ** 2
    Idefics3Processor(
        image_processor=images, tokenizer=tokenizer, image_seq_len=tokens, chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    save_vision_model(sys.argv[1])

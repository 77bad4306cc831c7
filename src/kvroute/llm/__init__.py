"""LLM geometry: the size of the KV cache that a model stores and sends, from a preset or a Hugging Face config.json."""

from kvroute.llm.config import from_config
from kvroute.llm.geometry import Kind, Layers, Model, ModelShape
from kvroute.llm.presets import MODELS, model

__all__ = ["MODELS", "Kind", "Layers", "Model", "ModelShape", "from_config", "model"]

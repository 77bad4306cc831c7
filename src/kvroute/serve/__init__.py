"""The live gateway: an OpenAI-compatible server for prefill and decode engines, which the control core selects."""

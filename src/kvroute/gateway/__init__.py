"""The live gateway: an OpenAI-compatible door in front of prefill and decode engines, decided by the control core."""

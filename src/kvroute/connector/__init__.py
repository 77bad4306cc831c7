"""A KV connector for vLLM: the decode instance pulls a prompt's KV blocks from the prefill instance over TCP.

Only `vllm` and `vllm_metrics` in here import vllm, and `device` torch; everything else runs, and is tested, without it.
"""

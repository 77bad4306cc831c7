"""A KV connector for vLLM: the decode instance pulls a prompt's KV blocks from the prefill instance over TCP.

Only `vllm` and `vllm_metrics` import vllm, and only `device` imports torch. The rest runs and is tested without them.
"""

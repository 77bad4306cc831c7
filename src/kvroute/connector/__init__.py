"""A KV connector for vLLM: the decode instance pulls a prompt's KV blocks from the prefill instance over TCP.

Only `kvroute.connector.vllm` imports vllm; everything else runs, and is tested, without it.
"""

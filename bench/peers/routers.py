"""The Rust routers of vLLM and SGLang from the package index, as command lines; both spread prefill and decode.

`round_robin` for both legs is their cheapest policy. Logs are down to errors, which else write a line per request;
metrics stay on as they are by default, retries and circuit breakers too.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.peers.environment import programs

BOOTSTRAP_PORT = 8998
"""Of SGLang's prefill workers; nobody listens there, since the stand-ins move no KV cache."""


def vllm_router(port: int, metrics_port: int, prefill: Sequence[int], decode: Sequence[int]) -> list[str]:
    """vllm-router with vLLM's NIXL protocol: prefill first, its `kv_transfer_params` go to decode."""
    legs = [word for one in prefill for word in ("--prefill", _url(one))]
    return _command("vllm-router", port, metrics_port, ["--vllm-pd-disaggregation", *legs], decode, "error")


def sglang_router(port: int, metrics_port: int, prefill: Sequence[int], decode: Sequence[int]) -> list[str]:
    """sglang-router with SGLang's protocol: both legs at once, joined by a bootstrap room."""
    legs = [word for one in prefill for word in ("--prefill", _url(one), str(BOOTSTRAP_PORT))]
    return _command("sglang-router", port, metrics_port, ["--pd-disaggregation", *legs], decode, "error")


def _command(
    program: str, port: int, metrics_port: int, prefill: Sequence[str], decode: Sequence[int], log_level: str
) -> list[str]:
    listen = ["--host", "127.0.0.1", "--port", str(port)]
    metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    targets = [word for one in decode for word in ("--decode", _url(one))]
    # Workers are asked whether they are up: every 30 s by default, so the first answer would decide the start.
    start = ["--worker-startup-check-interval", "1"]
    launch = ["launch"] if program == "sglang-router" else []
    return [
        *(str(programs("routers") / program), *launch, *listen, *prefill, *targets),
        *("--policy", "round_robin", "--log-level", log_level, *metrics, *start),
    ]


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"

"""Command lines of the Rust routers of vLLM and SGLang from the package index; both disaggregate prefill and decode.

`round_robin` for both legs is their cheapest policy. Logging is limited to errors, because otherwise every request
writes a line. Metrics, retries and circuit breakers keep their defaults.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.peers.environment import programs

BOOTSTRAP_PORT = 8998
"""Port of SGLang's prefill workers; nothing listens there, because the stand-ins transfer no KV cache."""


def vllm_router(port: int, metrics_port: int, prefill: Sequence[int], decode: Sequence[int]) -> list[str]:
    """Return vllm-router with vLLM's NIXL protocol: prefill first, its `kv_transfer_params` go to decode."""
    legs = [argument for prefill_engine in prefill for argument in ("--prefill", _url(prefill_engine))]
    return _command("vllm-router", port, metrics_port, ["--vllm-pd-disaggregation", *legs], decode, "error")


def sglang_router(
    port: int,
    metrics_port: int,
    prefill: Sequence[int],
    decode: Sequence[int],
    bootstrap_port: int = BOOTSTRAP_PORT,
) -> list[str]:
    """Return sglang-router with SGLang's protocol: both legs at once, connected by a bootstrap room."""
    legs = [
        argument for prefill_engine in prefill for argument in ("--prefill", _url(prefill_engine), str(bootstrap_port))
    ]
    return _command("sglang-router", port, metrics_port, ["--pd-disaggregation", *legs], decode, "error")


def _command(
    program: str, port: int, metrics_port: int, prefill: Sequence[str], decode: Sequence[int], log_level: str
) -> list[str]:
    listen = ["--host", "127.0.0.1", "--port", str(port)]
    metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    targets = [argument for decode_engine in decode for argument in ("--decode", _url(decode_engine))]
    # Routers check whether workers are up; with the default of 30 s, the first check would decide the start.
    start = ["--worker-startup-check-interval", "1"]
    launch = ["launch"] if program == "sglang-router" else []
    return [
        *(str(programs("routers") / program), *launch, *listen, *prefill, *targets),
        *("--policy", "round_robin", "--log-level", log_level, *metrics, *start),
    ]


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"

"""A picker without kvroute's core: `python -m bench.peers.bare_picker PORT IP:PORT...` names the endpoints in turn.

It reads each body, names one endpoint and acknowledges the response, in the fewest messages of ext_proc: the bound of a
picker in Python with grpcio. It has no prefill leg, limits, retries, health checks or metrics.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import uvloop

from kvroute.epp.envoy_pb2 import (
    HeadersResponse,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from kvroute.epp.messages import HEALTH, PROCESS, picked, streamed_replies


class Picker:
    """Names the endpoints in turn."""

    def __init__(self, endpoints: Iterator[str]) -> None:
        self._endpoints = endpoints

    async def process(self, _: Any, context: Any) -> None:
        """Serve one request."""
        body = b""
        while (message := await context.read()) is not grpc.aio.EOF:
            if message.HasField("request_headers"):
                if not message.request_headers.end_of_stream:
                    continue
            elif message.HasField("request_body"):
                body += message.request_body.body
                if not message.request_body.end_of_stream:
                    continue
            elif message.HasField("response_headers"):
                await context.write(ProcessingResponse(response_headers=HeadersResponse()))
                continue
            mutation, metadata = picked(next(self._endpoints), [], [])
            for reply in streamed_replies(mutation, metadata, body or None):
                await context.write(reply)


async def healthy(_: HealthCheckRequest, __: Any) -> HealthCheckResponse:
    """Answer a health check."""
    return HealthCheckResponse(status=HealthCheckResponse.SERVING)


def handler(path: str, method: grpc.RpcMethodHandler) -> grpc.GenericRpcHandler:
    """Return the handler of one method."""
    service, _, name = path[1:].rpartition("/")
    return grpc.method_handlers_generic_handler(service, {name: method})


async def main() -> None:
    """Serve until the process is ended."""
    picker, server = Picker(itertools.cycle(sys.argv[2:])), grpc.aio.server()
    process = grpc.stream_stream_rpc_method_handler(
        picker.process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
    )
    health = grpc.unary_unary_rpc_method_handler(
        healthy, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
    )
    server.add_generic_rpc_handlers((handler(PROCESS, process), handler(HEALTH, health)))
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(main())

"""A very fast stand-in for engines: many ports in one process, both legs of vLLM's and SGLang's protocols, no model.

It accepts any request, responds at once or in ticks, adds the time to every chunk and counts the requests. It validates
nothing and stores received requests for inspection (`GET /seen`). Started as `python -m bench.gateway.mock_worker`, it
prints one line of JSON with its ports when it is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import uvloop

MODEL = "llama-3-70b"
"""A preset of kvroute, because NetKV needs the size of the KV cache."""
SPREAD = 5
"""Number of groups of streams per tick; they are sent one after the other, so that chunks do not form one burst."""
FAULTS = ("status", "reset", "hang", "cut")
"""Status 500, a connection reset before the response, no response, and a reset in the middle of a stream."""
_USAGE = {"prompt_tokens": 512, "completion_tokens": 16, "total_tokens": 528}
_METRICS = "".join(
    f'vllm:{name}{{engine="0",model_name="{MODEL}"}} 0.0\n'
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
).encode()
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_CHUNK = (
    b'data: {"id":"cmpl-mock","object":"chat.completion.chunk","created":1,"model":"llama-3-70b","choices":'
    b'[{"index":0,"delta":{"content":" token"},"finish_reason":null}],"k":%d,"r":"%b","t":%d}\n\n'
)
_STREAM_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class KvParams(msgspec.Struct):
    """Fields of vLLM's protocols; others are ignored."""

    do_remote_decode: bool = False


class CompletionBody(msgspec.Struct):
    """Relevant fields of a request's body."""

    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    kv_transfer_params: KvParams | None = None
    bootstrap_room: Any = None
    user: str = ""
    """Repeated in every chunk as `r`, so that a client can detect the response of another client."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Speed and fault rate of the stand-in; times in seconds."""

    tick_s: float = 0.005
    prefill_s: float = 0.0
    fault_share: float = 0.0


@dataclass(slots=True)
class Worker:
    """All engines of the process: active streams, counters, and the latest requests."""

    pace: Pace
    draw: random.Random
    streaming: set[Connection] = field(default_factory=set)
    open: set[Connection] = field(default_factory=set)
    seen: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=64))
    capture: bool = False
    legs: Counter[str] = field(default_factory=Counter)
    """Legs by role and outcome, such as `decode.ended` or `prefill.reset`; a hanging leg counts again when closed."""
    ended: Counter[str] = field(default_factory=Counter)
    """Complete decode legs by the request's `user`."""
    engines: dict[int, Engine] = field(default_factory=dict)

    def fault(self, streams: bool) -> str:
        """Return the fault of the next leg, usually ""."""
        if not self.pace.fault_share or self.draw.random() >= self.pace.fault_share:
            return ""
        return self.draw.choice(FAULTS if streams else FAULTS[:3])

    async def tick(self) -> None:
        """Send the next chunk of every stream, group after group, forever."""
        due, turn = time.monotonic(), 0
        while True:
            due += self.pace.tick_s / SPREAD
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            for connection in [streaming for streaming in self.streaming if streaming.group == turn]:
                connection.send_chunk()
            turn = (turn + 1) % SPREAD

    def stats(self) -> dict[str, Any]:
        """Return the counters; `open` are active legs, `repeated` are responses that completed twice."""
        repeated = sum(count - 1 for count in self.ended.values())
        connections = sum(len(engine.connections) for engine in self.engines.values())
        return {"legs": dict(self.legs), "open": len(self.open), "repeated": repeated, "connections": connections}


@dataclass(slots=True, eq=False)
class Engine:
    """One port in one role."""

    worker: Worker
    role: str
    port: int = 0
    server: asyncio.Server | None = None
    connections: set[Connection] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The engine id."""
        return f"engine-{self.port}"

    async def listen(self) -> None:
        """Listen on the port; the first time on a free one."""
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(lambda: Connection(self), "127.0.0.1", self.port, backlog=1024)
        self.port = self.server.sockets[0].getsockname()[1]

    async def restart(self, down_s: float) -> None:
        """Break every connection, refuse new ones for a while, then listen again."""
        assert self.server is not None
        self.server.close()
        for connection in list(self.connections):
            connection.transport.abort()
        await self.server.wait_closed()
        await asyncio.sleep(down_s)
        await self.listen()


class Connection(asyncio.Protocol):
    """One connection from a router: sequential requests, with content-length or chunked."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.worker = engine, engine.worker
        self.group = id(self) // 64 % SPREAD
        self._buffer = b""
        self._left, self._sent, self._cut_at, self._echo = 0, 0, -1, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.engine.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.engine.connections.discard(self)
        self.worker.streaming.discard(self)
        if self in self.worker.open:
            self._close("left")

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        while self._buffer:
            request = _request(self._buffer)
            if request is None:
                return
            head, body, self._buffer = request
            self._answer(head, body)

    def send_chunk(self) -> None:
        """Send the stream's next token, or break the stream."""
        if self._sent == self._cut_at:
            self._close("cut")
            self.transport.abort()
            return
        event = _CHUNK % (self._sent, self._echo, time.monotonic_ns())
        data = b"%x\r\n%b\r\n" % (len(event), event)
        if not self._sent:
            data = _STREAM_HEAD + data
        self._sent += 1
        if self._sent >= self._left:
            data += _STREAM_END
            self._ended()
        self.transport.write(data)

    def _answer(self, head: bytes, body: bytes) -> None:
        method, path, _ = head.split(b" ", 2)
        if method == b"GET":
            self.transport.write(self._page(path))
            return
        if method != b"POST":  # sglang-router tries HTTP/2 first
            self.transport.close()
            return
        completion = msgspec.json.decode(body, type=CompletionBody) if body else CompletionBody()
        if self.worker.capture:
            self._keep(path, head, body)
        self.worker.open.add(self)
        fault = self.worker.fault(completion.stream)
        if fault in ("status", "reset", "hang"):
            self._fail(fault)
            return
        prefills = bool(completion.kv_transfer_params and completion.kv_transfer_params.do_remote_decode)
        self._echo = completion.user.encode()
        if completion.stream:
            # SGLang's prefill receives the client's own body and ends after its first token.
            alone = self.engine.role == "prefill" and completion.bootstrap_room is not None
            self._left = 1 if alone else completion.max_completion_tokens or completion.max_tokens or 16
            self._sent, self._cut_at = 0, self._left // 2 if fault == "cut" else -1
            self.worker.streaming.add(self)
            self.send_chunk()
        elif self.worker.pace.prefill_s and self.engine.role == "prefill":
            asyncio.get_running_loop().call_later(self.worker.pace.prefill_s, self._whole, prefills)
        else:
            self._whole(prefills)

    def _whole(self, prefills: bool) -> None:
        if self.transport.is_closing():
            return
        self._ended()
        self.transport.write(_json(self._completion(prefills)))

    def _completion(self, prefills: bool) -> dict[str, Any]:
        choice = {"index": 0, "message": {"role": "assistant", "content": "hello world"}, "finish_reason": "stop"}
        answer: dict[str, Any] = {"id": "cmpl-mock", "object": "chat.completion", "created": 1, "model": MODEL}
        answer |= {"choices": [choice], "usage": _USAGE, "r": self._echo.decode()}
        if prefills:
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [[1, 2, 3, 4]],
                "remote_engine_id": self.engine.name,
                "remote_request_id": "cmpl-mock",
                "remote_host": "127.0.0.1",
                "remote_port": 5600,
                "tp_size": 1,
            }
        return answer

    def _fail(self, fault: str) -> None:
        if fault == "hang":
            self.worker.legs[f"{self.engine.role}.hang"] += 1
            return
        self._close(fault)
        if fault == "reset":
            self.transport.abort()
        else:
            body = b'{"error":{"message":"injected","type":"internal_server_error"}}'
            self.transport.write(_reply(body, b"application/json", b"500 Internal Server Error"))

    def _ended(self) -> None:
        self._close("ended")
        if self.engine.role == "decode" and self._echo:
            self.worker.ended[self._echo.decode()] += 1

    def _close(self, outcome: str) -> None:
        self.worker.streaming.discard(self)
        self.worker.open.discard(self)
        self.worker.legs[f"{self.engine.role}.{outcome}"] += 1

    def _keep(self, path: bytes, head: bytes, body: bytes) -> None:
        engine = self.engine
        entry = {"at_s": time.monotonic(), "role": engine.role, "engine": engine.name, "path": path.decode()}
        headers = [line.decode(errors="replace") for line in head.split(b"\r\n")[1:]]
        self.worker.seen.append({**entry, "headers": headers, "body": json.loads(body or b"null")})

    def _page(self, path: bytes) -> bytes:
        if path.startswith(b"/v1/models"):
            model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "root": MODEL}
            return _json({"object": "list", "data": [{**model, "max_model_len": 131_072}]})
        if path.startswith(b"/metrics"):
            return _reply(_METRICS, b"text/plain; version=0.0.4; charset=utf-8")
        if path.endswith(b"_info"):  # SGLang: /server_info, /get_model_info, ...
            return _json(_server_info(self.engine.role))
        if path.startswith(b"/query"):  # Mooncake's bootstrap server
            return _json({"0": {"engine_id": self.engine.name, "worker_addr": {"0": {"0": "127.0.0.1:1"}}}})
        return _json({})


class ControlConnection(asyncio.Protocol):
    """The bench's control port: GET /stats, GET /seen, POST /capture, POST /restart?port=P&down_s=S."""

    def __init__(self, worker: Worker, tasks: set[asyncio.Task[None]]) -> None:
        self._worker, self._tasks = worker, tasks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        _, path, _ = data.decode().split(" ", 2)
        route, _, query = path.partition("?")
        options = dict(pair.split("=") for pair in query.split("&") if pair)
        self._transport.write(_json(self._do(route, options)))
        self._transport.close()

    def _do(self, route: str, options: dict[str, str]) -> Any:
        if route == "/capture":
            self._worker.capture = True
        if route == "/seen":
            return list(self._worker.seen)
        if route == "/restart":
            task = asyncio.ensure_future(self._worker.engines[int(options["port"])].restart(float(options["down_s"])))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return self._worker.stats()


def _request(buffer: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Return head, body and rest; None if the request is incomplete. It does not validate the sender's data."""
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return None
    head, start = buffer[:end], end + 4
    low = head.lower()
    at = low.find(b"content-length:")
    if at >= 0:
        stop = start + int(low[at + 15 :].split(b"\r\n", 1)[0])
        return (head, buffer[start:stop], buffer[stop:]) if len(buffer) >= stop else None
    if b"transfer-encoding: chunked" not in low:
        return head, b"", buffer[start:]
    parts: list[bytes] = []
    while (line_end := buffer.find(b"\r\n", start)) >= 0:
        size = int(buffer[start:line_end], 16)
        stop = line_end + 2 + size
        if len(buffer) < stop + 2:
            return None
        if not size:
            return head, b"".join(parts), buffer[stop + 2 :]
        parts.append(buffer[line_end + 2 : stop])
        start = stop + 2
    return None


def _reply(body: bytes, content_type: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (status, content_type, len(body)) + body


def _json(document: Any) -> bytes:
    return _reply(msgspec.json.encode(document), b"application/json")


def _server_info(role: str) -> dict[str, Any]:
    """Return the information that SGLang's router requests from a worker before using it."""
    return {
        "model_path": MODEL,
        "tokenizer_path": MODEL,
        "served_model_name": MODEL,
        "disaggregation_mode": role,
        "disaggregation_bootstrap_port": 8998 if role == "prefill" else None,
        "tp_size": 1,
        "dp_size": 1,
        "load_balance_method": "round_robin",
        "version": "0.5.0",
        "is_generation": True,
        "max_running_requests": 256,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    }


async def serve(prefill: int, decode: int, pace: Pace, seed: int) -> None:
    """Listen on the given number of ports of each role until the process is ended; print them as one line of JSON."""
    worker = Worker(pace, random.Random(seed))
    tasks: set[asyncio.Task[None]] = set()
    for role in ["prefill"] * prefill + ["decode"] * decode:
        engine = Engine(worker, role)
        await engine.listen()
        worker.engines[engine.port] = engine
    control = await asyncio.get_running_loop().create_server(lambda: ControlConnection(worker, tasks), "127.0.0.1", 0)
    ports = {
        role: [port for port, client in worker.engines.items() if client.role == role] for role in ("prefill", "decode")
    }
    print(json.dumps({**ports, "control": control.sockets[0].getsockname()[1]}), flush=True)
    await worker.tick()


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", type=int, default=8)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--tick-ms", type=float, default=5.0, help="between the chunks of a stream")
    parser.add_argument("--prefill-ms", type=float, default=0.0, help="before the answer of a prefill leg")
    parser.add_argument("--fault-share", type=float, default=0.0, help="of all legs")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    given = parser.parse_args()
    pace = Pace(given.tick_ms / 1e3, given.prefill_ms / 1e3, given.fault_share)
    uvloop.run(serve(given.prefill, given.decode, pace, given.seed))


if __name__ == "__main__":
    main()

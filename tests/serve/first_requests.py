"""Usage: python -m tests.serve.first_requests POLICY VARIANT; prints the modules that are imported and the kernels
that are compiled, or loaded from the cache, during the first requests to a gateway, as JSON.

Client and engines are in processes of their own, so that all that is imported here belongs to the gateway.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import msgspec
from tests.commands import kvroute_command
from tests.control.first_requests import signatures
from tests.waiting import until

from kvroute.serve.api.api_keys import hash_text
from kvroute.serve.assembly import Deployment, Gateway
from kvroute.types import Endpoint

EXAMPLE = Path(__file__).parents[2] / "examples/small.yaml"


class Ready(msgspec.Struct):
    """What the emulated engines print."""

    instances: dict[str, Endpoint]


SECTIONS = {
    "policy": "",
    "tenants": """
  keys: {known: {one: KEY}}
  cache_salt: per-key
  classes: {default: {requests_per_minute: 20, slo: {ttft: 2 s, header: true}}}
  fair_queue: {work: 1 s}
  retries: {continue_streams: true}
  prompt: {without_tokenizer: engine}
  oracle: {source: push}
""",
}
"""Further settings by the name of a variant."""

CLIENT = """
import gzip, json, socket, sys, urllib.error, urllib.request
url, admin = sys.argv[1:]
JSON, MODEL = {"content-type": "application/json"}, "llama-3-70b"
MESSAGES = [{"role": "user", "content": "What is a KV cache? " * 20}]
PARTS = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}}}
CHAT, LONG = "/v1/chat/completions", {"prompt": "What is a KV cache? " * 20, "max_tokens": 20}
BODIES = [
    ("/v1/completions", LONG),
    ("/v1/completions", LONG | {"stream": True}),
    ("/v1/completions", {"prompt": [1, 2, 3] * 20, "max_tokens": 4, "n": 2, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": "a" * 400_000, "max_tokens": 4}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 4, "tools": TOOLS, "tool_choice": "required"}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 40, "response_format": SCHEMA, "stream": True}),
    (CHAT, {"messages": [{"role": "user", "content": PARTS}], "max_tokens": 4, "stream": True}),
    *(("/v1/messages", {"messages": MESSAGES, "max_tokens": 4, "stream": stream}) for stream in (False, True)),
    *(("/v1/responses", {"input": "hi", "max_output_tokens": 4, "stream": stream}) for stream in (False, True)),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/v1/embeddings", {"input": "hi", "encoding_format": "base64"}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/tokenize", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": {}}),
    ("/v1/completions", {"model": "absent", "prompt": "hi"}),
    ("/v1/completions", b"not json"),
    ("/v1/messages", b"[" * 100_000),
    ("/v1/completions", b"a" * 64_000_001),
    ("/nowhere", {}),
]
REQUEST = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 2}).encode()
CODED = [("gzip", gzip.compress(REQUEST)), ("zstd", REQUEST), ("deflate", REQUEST), ("br", REQUEST)]
FORM = b'--x\\r\\nContent-Disposition: form-data; name="model"\\r\\n\\r\\nllama-3-70b\\r\\n--x--\\r\\n'


def ask(address, data=None, **headers):
    key = {"authorization": "Bearer one", "x-session-id": "a", "x-slo-ttft-ms": "5000"}
    try:
        urllib.request.urlopen(urllib.request.Request(address, data, key | headers)).read()
    except urllib.error.HTTPError as error:
        assert error.read() is not None and error.code != 500, (address, data[:100])


for path, body in BODIES:
    ask(url + path, body if isinstance(body, bytes) else json.dumps({"model": MODEL} | body).encode(), **JSON)
for coding, body in CODED:
    ask(url + "/v1/completions", body, **JSON, **{"content-encoding": coding})
ask(url + "/v1/audio/transcriptions", FORM, **{"content-type": "multipart/form-data; boundary=x"})
ask(url + "/v1/completions", REQUEST, **JSON, origin="http://other")
for _ in range(10):
    ask(url + "/v1/completions", REQUEST, **JSON)
for page in ("/v1/models", "/v1/models/" + MODEL, "/v1/models/x", "/v1/completions", "/health", "/openapi.json"):
    ask(url + page)
for page in ("/", "/metrics", "/state", "/config", "/ready", "/version", "/nowhere"):
    ask(admin + page)
ask(admin + "/metrics", accept="application/openmetrics-text")
ask(admin + "/telemetry", b'{"per_tier": {"rack": 0.3}}', **JSON)
ask(admin + "/telemetry", b'{"x": 1}', **JSON)
LONG_LINE = b"GET /" + b"a" * 100_000 + b" HTTP/1.1"
for line in (b"GET / HTTP/9", b"\\x16\\x03\\x01\\0", b"PRI * HTTP/2.0\\r\\n\\r\\nSM", LONG_LINE):
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        client.sendall(line + b"\\r\\n\\r\\n")
        client.recv(1000)
with socket.create_connection(("127.0.0.1", int(admin.rpartition(":")[2]))) as client:
    client.sendall(b"GET /events HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    client.recv(1000)
"""


async def first_requests(policy: str, variant: str, folder: Path) -> dict[str, list[str]]:
    """Return the imported modules, and the compiled kernels."""
    file, ready = folder / "cluster.yaml", folder / "ready"
    rest = SECTIONS[variant].replace("KEY", hash_text("one"))
    section = f"  policy: {policy}\n  listen: {{port: 0}}\n  admin: {{port: 0}}\n  log: {{events: events.log}}\n{rest}"
    file.write_text(f"{EXAMPLE.read_text()}\ngateway:\n{section}")
    command = kvroute_command("emulate", str(file), "--until-eof", "--ready-file", str(ready))
    engines = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    try:
        await until(ready.exists)
        await until(lambda: bool(ready.read_bytes()))
        endpoints = {
            name: msgspec.structs.replace(instance, url=instance.url.replace("127.0.0.1", "localhost"))
            for name, instance in msgspec.json.decode(ready.read_bytes(), type=Ready).instances.items()
        }
        gateway = Gateway(Deployment.read(file, endpoints=endpoints), seed=1)
        await gateway.start()
        modules, kernels = set(sys.modules), signatures()
        urls = [f"http://127.0.0.1:{port}" for port in (gateway.port, gateway.admin_port)]
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, *urls)
        assert await client.wait() == 0
        found = {
            "modules": sorted(set(sys.modules) - modules),
            "kernels": sorted((signatures() - kernels).elements()),
        }
        await gateway.close()
        return found
    finally:
        assert engines.stdin is not None
        engines.stdin.close()
        await engines.wait()


def main() -> None:
    """Print the result."""
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(json.dumps(asyncio.run(first_requests(sys.argv[1], sys.argv[2], Path(folder)))) + "\n")


if __name__ == "__main__":
    main()

"""Usage: python -m tests.gateway.first_requests POLICY; prints the modules that are imported and the kernels that are
compiled, or loaded from the cache, during the first requests to a gateway, as JSON.

Client and engines are in processes of their own, so that all that is imported here belongs to the gateway.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import msgspec
from tests.control.first_requests import signatures
from tests.waiting import until

from kvroute.gateway.gateway import Deployment, Gateway
from kvroute.types import Endpoint

EXAMPLE = Path(__file__).parents[2] / "examples/small.yaml"


class Ready(msgspec.Struct):
    """What the emulated engines print."""

    instances: dict[str, Endpoint]


CLIENT = """
import json, sys, urllib.error, urllib.request
url, admin = sys.argv[1:]
MESSAGES = [{"role": "user", "content": "What is a KV cache? " * 20}]
PARTS = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
BODIES = [
    ("/v1/completions", {"prompt": "What is a KV cache? " * 20, "max_tokens": 4}),
    ("/v1/completions", {"prompt": "What is a KV cache? " * 20, "max_tokens": 20, "stream": True}),
    ("/v1/completions", {"prompt": [1, 2, 3] * 20, "max_tokens": 4, "n": 2}),
    ("/v1/completions", {"prompt": "a" * 400_000, "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "tools": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": PARTS}], "max_tokens": 4, "stream": True}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
    ("/v1/embeddings", {"input": "hi"}),
    ("/v1/completions", {"prompt": {}}),
    ("/v1/completions", b"not json"),
    ("/nowhere", {}),
]
for path, body in BODIES:
    data = body if isinstance(body, bytes) else json.dumps({"model": "llama-3-70b"} | body).encode()
    try:
        urllib.request.urlopen(urllib.request.Request(url + path, data, {"content-type": "application/json"})).read()
    except urllib.error.HTTPError as error:
        error.read()
for page in (url + "/v1/models", url + "/health", admin + "/metrics"):
    urllib.request.urlopen(page).read()
"""


async def first_requests(policy: str, folder: Path) -> dict[str, list[str]]:
    """Return the imported modules, and the compiled kernels."""
    file, ready = folder / "cluster.yaml", folder / "ready"
    gateway_section = (
        f"gateway: {{listen: {{port: 0}}, admin: {{port: 0}}, policy: {policy}, log: {{events: events.log}}}}"
    )
    file.write_text(f"{EXAMPLE.read_text()}\n{gateway_section}\n")
    program = str(Path(sys.executable).with_name("kvroute"))
    command = (program, "emulate", str(file), "--until-eof", "--ready-file", str(ready))
    engines = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    try:
        await until(ready.exists)
        await until(lambda: bool(ready.read_bytes()))
        endpoints = {
            name: msgspec.structs.replace(each, url=each.url.replace("127.0.0.1", "localhost"))
            for name, each in msgspec.json.decode(ready.read_bytes(), type=Ready).instances.items()
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
        sys.stdout.write(json.dumps(asyncio.run(first_requests(sys.argv[1], Path(folder)))) + "\n")


if __name__ == "__main__":
    main()

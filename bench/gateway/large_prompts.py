"""Effect of large prompts and bodies on other clients and on memory: `python -m bench.gateway.large_prompts`.

Each case starts a separate gateway in front of stand-in engines and sends its large requests at once. A probe in
another process repeatedly requests `/health` and a completion of a 5 KB prompt from the same gateway, and records the
longest time of each. Memory is the gateway's peak resident size, before and after.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gateway.contenders import Place, answering, kvroute
from bench.gateway.program import Program
from bench.gateway.tokenizer import write_tokenizer
from bench.measurement import Row, show

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL = "llama-3-70b"
WORDS = "the network moves blocks of the cache between nodes; "
SMALL_BYTES = 5_000
SETTLE_S = 2.0
ANSWER_S = 300.0
TEMPLATE = "{{ preamble }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
TOKENIZER = {"prompt": {"tokenizer": "FOLDER"}}


@dataclass(frozen=True, slots=True)
class Case:
    """Several large requests that are sent at once."""

    name: str
    path: str
    body: Callable[[], bytes]
    requests: int
    section: Mapping[str, Any]
    """Settings of the `gateway` section."""


def text(nbytes: int) -> str:
    """Return text of this many bytes."""
    return (WORDS * (nbytes // len(WORDS) + 1))[:nbytes]


def prompt_body(nbytes: int) -> bytes:
    """Return a completion request with a prompt of this many bytes."""
    return json.dumps({"model": MODEL, "prompt": text(nbytes), "max_tokens": 1}).encode()


def chat_body(nbytes: int, **fields: Any) -> bytes:
    """Return a chat request with a message of this many bytes, and further fields."""
    messages = [{"role": "user", "content": text(nbytes)}]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1, **fields}).encode()


def extra_body(nbytes: int) -> bytes:
    """Return a short chat request whose `chat_template_kwargs` hold this many bytes."""
    return chat_body(20, chat_template_kwargs={"preamble": text(nbytes)})


CASES = (
    Case("template arguments of 4.8 MB", CHAT, lambda: extra_body(4_800_000), 1, TOKENIZER),
    Case("template arguments of 48 MB", CHAT, lambda: extra_body(48_000_000), 1, TOKENIZER),
    Case("one prompt of 3 MB", COMPLETIONS, lambda: prompt_body(3_000_000), 1, TOKENIZER),
    Case("four prompts of 3 MB", COMPLETIONS, lambda: prompt_body(3_000_000), 4, TOKENIZER),
    Case("one prompt of 20 MB", COMPLETIONS, lambda: prompt_body(20_000_000), 1, TOKENIZER),
    Case("four prompts of 15 MB", COMPLETIONS, lambda: prompt_body(15_000_000), 4, TOKENIZER),
    Case("seven bodies of 63 MB", CHAT, lambda: chat_body(63_000_000), 7, {}),
)


def post(port: int, path: str, body: bytes) -> tuple[int, float]:
    """Return status and seconds of one request; status 0: no response."""
    start = time.monotonic()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as client:
            head = f"POST {path} HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            with contextlib.suppress(ConnectionError):  # rejected before its end: read the response
                client.sendall(head.encode())
                client.sendall(body)
            line = client.makefile("rb").readline()
    except OSError:
        return 0, time.monotonic() - start
    return int(line.split()[1]) if line else 0, time.monotonic() - start


def probe(port: int, result: Path) -> None:
    """Send the two small requests until SIGTERM, then write the longest time of each."""
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    worst = {"health_s": 0.0, "small_prompt_s": 0.0, "small_prompt_refused": 0}

    def send(figure: str, method: str, path: str, body: bytes | None) -> None:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
        while not over.is_set():
            start = time.monotonic()
            client.request(method, path, body)
            answer = client.getresponse()
            answer.read()
            worst[figure] = max(worst[figure], time.monotonic() - start)
            if answer.status != 200:
                worst["small_prompt_refused"] += 1
            over.wait(0.002)

    body = prompt_body(SMALL_BYTES)
    threads = [
        threading.Thread(target=send, args=("health_s", "GET", "/health", None)),
        threading.Thread(target=send, args=("small_prompt_s", "POST", COMPLETIONS, body)),
    ]
    for thread in threads:
        thread.start()
    print(json.dumps({"ready": True}), flush=True)
    over.wait()
    for thread in threads:
        thread.join()
    result.write_text(json.dumps(worst), encoding="ascii")


def peak_mib(pid: int) -> float:
    """Return the highest resident size of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def measured(case: Case, workers: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Run one case from the gateway's start to its end; return its figures."""
    body = case.body()
    place = Place.of(workers, folder)
    answers: list[tuple[int, float]] = []
    with answering(kvroute(case.section)(place), case.name, place, cpus=()) as gateway:
        result = folder / "probe.json"
        command = [sys.executable, "-m", "bench.gateway.large_prompts", "--probe", str(place.port), str(result)]
        with Program(command) as prober:
            prober.document()
            time.sleep(SETTLE_S)
            before = peak_mib(gateway.pid)
            clients = [
                threading.Thread(target=lambda: answers.append(post(place.port, case.path, body)))
                for _ in range(case.requests)
            ]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
            time.sleep(SETTLE_S)
            after = peak_mib(gateway.pid)
            prober.send_signal(signal.SIGTERM)
            prober.wait(ANSWER_S)
            worst = json.loads(result.read_text(encoding="ascii"))
    statuses = sorted(status for status, _ in answers)
    slowest_s = max(seconds for _, seconds in answers)
    return {"before_mib": before, "after_mib": after, "statuses": statuses, "slowest_s": slowest_s, **worst}


def rows(case: Case, figures: Mapping[str, Any]) -> list[Row]:
    """Return the figures of a case as rows."""
    statuses = ", ".join(map(str, figures["statuses"]))
    note = f"{case.name}: answered {statuses} within {figures['slowest_s']:.2f} s"
    if figures["small_prompt_refused"]:
        note += f"; {figures['small_prompt_refused']} of the probe's requests were refused"
    grown = figures["after_mib"] - figures["before_mib"]
    named = (("/health at worst", "s", figures["health_s"]), ("5 KB prompt at worst", "s", figures["small_prompt_s"]))
    return [
        *(Row(measure=f"{case.name}: {what}", unit=unit, better="lower", ours=ours) for what, unit, ours in named),
        Row(measure=f"{case.name}: memory added at the peak", unit="MiB", better="lower", ours=grown, note=note),
    ]


def main() -> None:
    """Run the named cases, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="parts of the names of cases; default all cases")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--probe", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        probe(int(options.probe[0]), Path(options.probe[1]))
        return
    selected = [case for case in CASES if not options.cases or any(part in case.name for part in options.cases)]
    all_rows: list[Row] = []
    worker = [sys.executable, "-m", "bench.gateway.mock_worker", "--prefill", "2", "--decode", "2"]
    with tempfile.TemporaryDirectory() as scratch, Program(worker) as mock:
        folder = Path(scratch)
        write_tokenizer(folder / "tokenizer.json")
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
        workers = mock.document()
        for case in selected:
            print(case.name, file=sys.stderr, flush=True)
            all_rows += rows(case, measured(case, workers, folder))
    show(all_rows, options.json)


if __name__ == "__main__":
    main()

"""Follows pods and nodes with the informer of the official Kubernetes client; same protocol as `bench.kube.follower`.

It runs in the peer's environment and needs nothing else.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time

from kubernetes import client  # type: ignore[import-not-found]
from kubernetes.informer import SharedInformer  # type: ignore[import-not-found]

LOCK = threading.Lock()


def tell(**fields: object) -> None:
    """Print one line of JSON."""
    with LOCK:
        print(json.dumps(fields), flush=True)


def rss_mb() -> float:
    """Return the present memory of this process, in MB (1e6 bytes)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def main(url: str, pods: int, nodes: int) -> None:
    """Start both informers; answer `cpu` on standard input with the CPU time, until its end."""
    configuration = client.Configuration(host=url, api_key={"authorization": "Bearer admin"})
    api = client.CoreV1Api(client.ApiClient(configuration))
    before_mb, cpu_s, begun_s = rss_mb(), time.process_time(), time.time()
    of_pods = SharedInformer(api.list_namespaced_pod, namespace="llm")
    of_nodes = SharedInformer(api.list_node)
    of_pods.add_event_handler("MODIFIED", lambda pod: tell(pod=pod.metadata.name, at_s=time.time()))
    of_pods.start()
    of_nodes.start()
    while len(of_pods.cache.list_keys()) < pods or len(of_nodes.cache.list_keys()) < nodes:
        time.sleep(0.01)
    synced_s = time.time() - begun_s
    tell(synced_s=synced_s, cpu_s=time.process_time() - cpu_s, rss_mb=rss_mb(), imported_mb=before_mb)
    for _ in sys.stdin:
        tell(cpu_s=time.process_time(), rss_mb=rss_mb())


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

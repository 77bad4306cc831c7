"""Help topics: short texts for `kvroute help TOPIC`, and for the page of the command line in the documentation.

Where the code knows a value (units, ranges, names of policies), the text takes it from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvroute.policies import DECODE_USES, DEFAULT_DECODE_POLICY
from kvroute_engine.files.units import Bandwidth, Duration, Latency, Quantity, Size


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic; text may have `code` in backquotes."""

    title: str
    paragraphs: tuple[str, ...]
    rows: tuple[tuple[str, str], ...] = ()
    """Terms and their meaning."""
    commands: tuple[tuple[str, str], ...] = ()
    """Commands to try and what they do."""
    page: str = ""
    """Page of docs/ with the details."""


SECTIONS = {
    "name": "name of the cluster",
    "fabric": "shorthand for `pods`, `racks` and `nodes`: a fat tree or a SuperPOD",
    "datacenters": "sites; without this section there is one",
    "pods": "racks below one aggregation layer",
    "racks": "nodes below one switch",
    "nodes": "servers: GPUs, NVLink, network cards",
    "wan": "links between datacenters",
    "network": "latencies, ECMP, flows of each transfer, assumed bandwidths",
    "storage": "store of KV blocks that all nodes share: bandwidth, buffers, read path",
    "timing": "prefill and decode times of an engine; `kvroute timing fit` prints them",
    "defaults": "values for instances that do not set them",
    "instances": "engines: role, GPUs, model, KV memory, endpoint",
    "collectives": "switches that aggregate the all-reduces of tensor-parallel groups",
    "discovery": "where engines that come and go are found: a file, DNS or Kubernetes",
    "qos": "traffic classes of the compute network; `kvroute plan qos` prints their configuration",
    "placement": "GPU kinds and lengths of requests for `kvroute plan placement`",
    "gateway": "settings of `kvroute serve`",
}
"""The sections of a cluster file."""

VARIABLES = {
    "NUMBA_CACHE_DIR": "folder for compiled kernels; by default `__pycache__` beside the code, if it can be written",
    "TMPDIR": "folder for temporary files",
    "COLUMNS": "width of tables, where the output is not a terminal",
    "SSL_CERT_FILE": "certificates to trust at `https://` engines, in place of the system's",
    "KVROUTE_TRACES": "folder of recorded traces for `kvroute experiment never-worse`, of measured runs for `accuracy`",
    "KUBECONFIG": "kubeconfig of kvroute's Kubernetes commands, outside of a pod",
    "POD_NAME": "identity of `kvroute kube operator` in the election of a leader; by default the host's name",
    "KVROUTE_TOPOLOGY_ENABLED": "whether `kvroute kube run-worker` reads topology labels",
    "KVROUTE_TOPOLOGY_MOUNT_PATH": "folder of the label files for `kvroute kube run-worker`",
    "KVROUTE_TOPOLOGY_WAIT_S": "seconds that the labels may take; then the engine is not started",
    "KVROUTE_KV_TRANSFER_TOPOLOGY_LEVEL": "level whose label must exist before the engine is started",
    "KVROUTE_KV_TRANSFER_MISMATCH_POLICY": "`fail` or `fallback`; checked by `kvroute kube run-worker`",
    "MASTER_ADDR": "host of rank 0 of a PyTorch group, from which a rank derives its own address",
    "VLLM_HOST_IP": "address that kvroute's connector advertises, if it listens on all addresses",
}
"""The environment variables that kvroute, or a library that it uses, reads under a fixed name."""


def topics() -> dict[str, Callable[[], Topic]]:
    """Return a function for each topic, by name, in the order of the list that users see."""
    return {
        "start": _start,
        "cluster-file": _cluster_file,
        "policies": _policies,
        "units": _units,
        "exit-codes": _exit_codes,
        "environment": _environment,
    }


def _start() -> Topic:
    return Topic(
        title="first commands, from a simulation to a gateway",
        paragraphs=(
            "A cluster file describes the servers, the network and the engines. The simulator and the gateway read "
            "the same file and decide with the same code.",
        ),
        commands=(
            ("kvroute topology new --prefill URL --decode URL", "write a first cluster file from engines' addresses"),
            ("kvroute topology check CLUSTER", "report every error with its line"),
            ("kvroute simulate CLUSTER", "compare policies on your cluster"),
            ("kvroute doctor CLUSTER", "check engines and KV transfers"),
            ("kvroute serve CLUSTER", "serve requests"),
            ("kvroute serve CLUSTER --embedded", "the same with emulated engines, without GPUs"),
        ),
        page="quickstart.md",
    )


def _cluster_file() -> Topic:
    return Topic(
        title="the YAML file that describes a cluster",
        paragraphs=(
            "It is YAML, with the sections below. `name` and `instances` are required, and `fabric` or `nodes`. "
            "Names have letters, digits, `-`, `_` and `.`; quantities have a unit. Aliases and tags are not read.",
        ),
        rows=tuple((f"`{name}`", text) for name, text in SECTIONS.items()),
        commands=(
            ("kvroute topology check CLUSTER", "report every error with its line"),
            ("kvroute topology show CLUSTER", "print tiers, bandwidths and instances"),
            ("kvroute topology expand CLUSTER", "replace shorthands by full entries"),
            ("kvroute topology schema", "print a JSON schema for editors"),
        ),
        page="cluster-file.md",
    )


def _policies() -> Topic:
    return Topic(
        title="which instance prefills and which one decodes",
        paragraphs=(
            "A decode policy chooses the instance that receives the KV cache. The default is "
            f"`{DEFAULT_DECODE_POLICY}`. Set another one with `--policy` (`kvroute simulate` takes several), or with "
            "`gateway.policy` in the cluster file.",
            "The prefill policy is `cache-aware` (the earliest finish), `least-loaded`, `round-robin` or `dualpath` "
            "(short storage queues first). A constraint such as `pod:required` keeps transfers inside a domain.",
            "When to use each decode policy:",
        ),
        rows=tuple((f"`{name}`", use) for name, use in DECODE_USES.items()),
        commands=(
            ("kvroute simulate CLUSTER --policy netkv --policy cla", "compare two policies"),
            ("kvroute serve CLUSTER --shadow netkv", "evaluate a policy without acting on it"),
            ("kvroute explain LOG REQUEST", "show the cost terms of a decision"),
        ),
        page="policies.md",
    )


def _units() -> Topic:
    kinds: tuple[type[Quantity], ...] = (Bandwidth, Latency, Duration, Size)
    return Topic(
        title="bandwidths, times, sizes and token counts",
        paragraphs=(
            "In a cluster file a quantity is a number and a unit, such as `100 Gbps`; a number without a unit is an "
            "error. Upper and lower case matter: `GB/s` is eight times `Gb/s`.",
            "Options take durations (`2s`, `500ms`), rates (`6/s`, `90/min`) and tokens (`32K`; K is 1,024). There "
            "a plain number is in seconds, requests per second or tokens.",
        ),
        rows=tuple((kind.noun, f"{kind.accepted}; {kind.range_text}; such as `{kind.example}`") for kind in kinds),
        page="cluster-file.md",
    )


def _exit_codes() -> Topic:
    return Topic(
        title="what the exit code of a command means",
        paragraphs=("Errors are printed on stderr. With `--json` stdout has one document and nothing else.",),
        rows=(
            ("0", "success"),
            (
                "1",
                "the check has failed: `doctor` or `kube check` has findings, `replay` finds a decision that differs, "
                "or `kube run-worker` finds no label",
            ),
            (
                "2",
                "the command line or a file is wrong, or an output cannot be written; the sentence says how to fix it",
            ),
            ("127", "`kube run-worker` cannot start the engine"),
            ("above 128", "a signal ended the command: 130 after Ctrl-C"),
        ),
        page="cli.md",
    )


def _environment() -> Topic:
    return Topic(
        title="environment variables that kvroute reads",
        paragraphs=(
            "Secrets are read from variables that you name: `gateway.upstream_key_env` and "
            "`gateway.cache_salt_secret_env` in the cluster file, `--key-env` of `kvroute doctor`, and `token_env` "
            "of kvroute's connector.",
        ),
        rows=tuple((f"`{name}`", text) for name, text in VARIABLES.items()),
        page="deploy.md",
    )

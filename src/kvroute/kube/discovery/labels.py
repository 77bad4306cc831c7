"""Names of all labels and annotations that discovery reads: kvroute's own and those of other projects.

docs/kubernetes-labels.md lists them with their sources. A name of kvroute may be a label or an annotation; the
label counts. Annotations exist because a label's value has at most 63 characters and no slash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from kvroute.types import Role

PREFIX = "kvroute.io/"
ROLE = "kvroute.io/role"
"""`prefill`, `decode`, `both`, or `none`: the pod is no engine, whatever its containers run."""
MODEL = "kvroute.io/model"
PROTOCOL = "kvroute.io/protocol"
"""`vllm`, `mooncake` or `sglang`."""
TP = "kvroute.io/tp"
PP = "kvroute.io/pp"
DP = "kvroute.io/dp"
"""Number of data-parallel ranks behind one port."""
PORT = "kvroute.io/port"
"""HTTP port; `8000-8007` or `8000,8001`: one data-parallel server on each port, rank 0 first."""
KV_EVENTS_PORT = "kvroute.io/kv-events-port"
"""Port of the ZMQ publisher of KV events of rank 0; 0: none."""
KV_REPLAY_PORT = "kvroute.io/kv-replay-port"
"""Port of the ZMQ socket that replays KV events of rank 0; 0: none."""
BOOTSTRAP_PORT = "kvroute.io/bootstrap-port"
CONTAINER = "kvroute.io/container"
"""Name of the container that runs the engine."""
TIMING = "kvroute.io/timing"
"""Name of a timing of the cluster file."""
TOPOLOGY_PREFIX = "kvroute.io/topology."
"""With a level appended: where the pod is, copied from its node (`kvroute.io/topology.rack`)."""

OWN_KEYS = (
    ROLE,
    MODEL,
    PROTOCOL,
    TP,
    PP,
    DP,
    PORT,
    KV_EVENTS_PORT,
    KV_REPLAY_PORT,
    BOOTSTRAP_PORT,
    CONTAINER,
    TIMING,
)

NOT_AN_ENGINE: Literal["none"] = "none"

ROLE_ALIASES: Mapping[str, Mapping[str, Role | Literal["none"]]] = {
    # llm-d/llm-d-router, pkg/epp/framework/plugins/scheduling/filter/bylabel/roles.go
    "llm-d.ai/role": {
        "prefill": "prefill",
        "decode": "decode",
        "prefill-decode": "both",
        "both": "both",
        "encode-prefill": "prefill",
        "encode-prefill-decode": "both",
        "encode": "none",
    },
    # ai-dynamo/dynamo, deploy/operator/internal/consts/consts.go; the sub-component type is the older form
    "nvidia.com/dynamo-sub-component-type": {"prefill": "prefill", "decode": "decode"},
    "nvidia.com/dynamo-component-type": {
        "prefill": "prefill",
        "decode": "decode",
        "worker": "both",
        "frontend": "none",
        "planner": "none",
        "epp": "none",
    },
    # llm-d/llm-d, guides/pd-disaggregation: the role's name in a DisaggregatedSet
    "disaggregatedset.x-k8s.io/role": {"prefill": "prefill", "decode": "decode"},
    # vllm-project/production-stack, routing logic disaggregated_prefill_orchestrated: `model: prefill`, `model: decode`
    "model": {"prefill": "prefill", "decode": "decode"},
}
"""Labels of other projects that give a role, by value; the first label with a known value counts."""

MODEL_ALIASES = (
    "nvidia.com/dynamo-base-model",  # an annotation with the model's whole name (consts.go, as above)
    "llm-d.ai/model",  # a short name, which clients need not use
)
"""Used only if neither `kvroute.io/model` nor the engine's command line has a name."""

DP_ALIAS = "llm-d.ai/data-parallel-ranks-per-member"
"""Label of llm-d (llm-d/llm-d-router, pkg/epp/datastore): ranks on each pod of an engine."""
DP_START_ALIAS = "llm-d.ai/data-parallel-rank-start"
"""Label of llm-d (the same package): number of the pod's first rank in the whole engine."""
BOOTSTRAP_PORT_ALIAS = "sglang.ai/bootstrap-port"
"""Annotation that SGLang's router reads (sgl-project/sglang, router arguments `bootstrap_port_annotation`)."""
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
"""Label of LeaderWorkerSet (kubernetes-sigs/lws, docs/reference/labels-annotations-and-environment-variables.md): 0 is
the leader, the only pod of a group that serves requests."""

KEPT_ANNOTATIONS = frozenset((*OWN_KEYS, *MODEL_ALIASES, BOOTSTRAP_PORT_ALIAS))
"""Annotations that the cache of pods keeps."""

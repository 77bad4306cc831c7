"""What the recordings of access, transport, restarts and outages leave out: files 02, 15, 16 and 17."""

from __future__ import annotations

from typing import Any

from tests.kube.replay import Replay
from tests.kube.scenario import Observe, Scenario, Step
from tests.kube.scenarios.objects import CONFIG_MAPS, config_map, if_object, merge

RS = f"{CONFIG_MAPS}/rs"


def kind(found: Any) -> Any:
    """Return the kind of an answer."""
    return {"kind": found["kind"]}


ACCOUNT = "/api/v1/namespaces/default/serviceaccounts/default/token"
ACCESS = Scenario(
    before={
        "02-auth/serviceaccount-whoami": (
            Step("POST", ACCOUNT, {"spec": {"expirationSeconds": 600}}, token="sa"),
        ),
    },
    projections={"02-auth/discovery-allowed-to-any-user": if_object(kind)},
)  # fmt: skip


async def many_gets(replay: Replay) -> Any:
    """Return the statuses of 300 requests in a row."""
    statuses = {(await replay.send("GET", "/api/v1/namespaces/default"))[0] for _ in range(300)}
    return {"sequentialGets": 300, "statuses": sorted(statuses)}


def compressed(path: str, accepted: str) -> Observe:
    """Return the observation of how a large or small answer comes."""

    async def observe(replay: Replay) -> Any:
        headers, size = await replay.head(path, {"Accept-Encoding": accepted})
        return {
            "status": 200, "contentEncoding": headers.get("content-encoding"), "vary": headers.get("vary"),
            "transferEncoding": headers.get("transfer-encoding"), "hasContentLength": "content-length" in headers,
            "decodedBytesOver128K": size > 128 * 1024,
        }  # fmt: skip

    return observe


def sized(name: str, count: int) -> Step:
    """Return the creation of a ConfigMap with a value of a size."""
    return Step("POST", CONFIG_MAPS, {"metadata": {"name": name}, "data": {"a": "b" * count}})


BIG = f"{CONFIG_MAPS}?limit=10"
TRANSPORT = Scenario(
    before={"15-transport/gzip-small-list": (sized("g0", 80_000), sized("g1", 80_000), sized("g2", 80_000))},
    observations={
        "15-transport/gzip-small-list": compressed("/api/v1/nodes", "gzip"),
        "15-transport/gzip-large-list": compressed(BIG, "gzip"),
        "15-transport/gzip-80KB-object": compressed(f"{CONFIG_MAPS}/g0", "gzip"),
        "15-transport/gzip-not-accepted": compressed(BIG, "identity"),
        "15-transport/deflate-only": compressed(BIG, "deflate"),
        "15-transport/gzip-q0": compressed(BIG, "gzip;q=0"),
        "15-transport/no-server-rate-limit": many_gets,
    },
    projections={f"15-transport/{case}": if_object(kind) for case in ("apf-level", "apf-schema", "apf-other-user")},
)


def numbered(number: int) -> Step:
    """Return the creation of a ConfigMap that outlives the restart."""
    return config_map(f"rs{number}", {"rs": "1"})


RESTART = Step("RESTART", "")
SHUTDOWN = Scenario(
    before={
        "16-shutdown/restart-list-before": (numbered(0), numbered(1), numbered(2)),
        "16-shutdown/restart-get-after": (
            merge(f"{RS}1", {"data": {"n": "1"}}),
            merge(f"{RS}2", {"data": {"n": "1"}}, rv3="metadata.resourceVersion"),
            RESTART,
        ),
        "16-shutdown/restart-watch-rv-0": (merge(f"{RS}0", {"data": {"m": "1"}}),),
        "16-shutdown/restart-continue-after-compaction": (
            Step("POST", "/_control/compact", {"cached": False}),
        ),
    },
)  # fmt: skip


FREEZE = Step("POST", "/_control/freeze", {"timeout_s": 0.2})
OUTAGE = Scenario(
    before={
        "17-outage/etcd-frozen-get": (config_map("out"), FREEZE),
        "17-outage/etcd-back-get": (Step("POST", "/_control/thaw"),),
    },
    projections={
        "17-outage/etcd-frozen-get": if_object(kind),
        "17-outage/etcd-back-get": if_object(lambda found: {"data": found["data"]}),
    },
)

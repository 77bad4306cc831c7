"""An admin port with a dashboard of a simulated cluster: real decisions of the core for a scripted load, no engines.

`python dashboard_feed.py PODS RACKS NODES RATE [NAME]` prints its port and runs until its standard input ends; `python
dashboard_feed.py two AWAY PREFILL DECODE RATE` has two datacenters, and each line of its standard input is the next
event between them: `cut`, `try`, `hint`, `switch_role` or `switched`; in any cluster `panic` or `calm`. With
`foresight` as the first argument it is the acting policy and NetKV the shadow policy; otherwise the reverse.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import sys
from collections.abc import Callable
from functools import partial

import msgspec

from kvroute.control import ControlSpec
from kvroute.policies.fleet.offload import OffloadSpec
from kvroute.serve.observe.admin.server import Admin, AdminParts
from kvroute.serve.observe.admin.state import DashboardState
from kvroute.serve.observe.metrics.metrics import Metrics
from kvroute.serve.observe.view import (
    BreakerState,
    ForesightLoad,
    GatewayStatus,
    InstanceLoad,
    OffloadLoad,
    OracleLoad,
    PanicLoad,
    ReviewLoad,
    RoleSwitchLoad,
    SiteLoad,
    TtftBreakdown,
)
from kvroute.topology import ClusterFile, InstanceCounts, build, fat_tree, two_datacenters
from kvroute.types import (
    CROSS_DATACENTER,
    Admitted,
    Arrived,
    CongestionMeasured,
    Decode,
    Finished,
    Prefill,
    PrefillFinished,
    Reject,
    Request,
    SwitchRole,
    TransferFinished,
)

KV_BYTES_PER_TOKEN = 327_680
STEP_S = 0.02
THRESHOLD_TOKENS = 2_000.0
PATH_STATES: dict[str, BreakerState] = {"cut": "open", "try": "half-open", "restore": "closed"}


class Feed:
    """Sends requests through a core in virtual time; round-robin decides every second one."""

    def __init__(self, file: ClusterFile, rate_per_s: float, policy: str = "netkv", seed: int = 1) -> None:
        self.cluster = build(file)
        self.now_s = 0.0
        self._draw, self._rate = random.Random(seed), rate_per_s
        offload = OffloadSpec(threshold_tokens=THRESHOLD_TOKENS, layerwise=False) if self.cluster.file.wan else None
        self._policy, shadow = policy, "netkv" if policy == "foresight" else "foresight"
        specs = {name: ControlSpec(decode=name, offload=offload, shadow=shadow) for name in (policy, "round-robin")}
        self._cores = {name: spec.build(self.cluster) for name, spec in specs.items()}
        self.state = DashboardState(self.cluster, self.load, policy=policy, version="0.1.0")
        self.state.shadow(shadow)
        roles = {instance.name: instance.role for instance in self.cluster.instances}
        self.metrics = Metrics(self.load, roles, version="0.1.0", policy=policy)
        self._here = dict.fromkeys(roles, 0)
        self._free_s = dict.fromkeys(roles, 0.0)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = self._order = 0
        self._panic = False
        self._wan_path: BreakerState = "closed"
        self._held: list[Callable[[], None]] = []
        self._changing = next(name for name in reversed(roles) if roles[name] == "decode")
        self._change = ""
        names = sorted(roles)
        self._sick = {names[len(names) // 3]: "open", names[len(names) // 2]: "half-open", names[-2]: "down"}
        self._at(0.0, self._arrive)
        self._at(0.5, self._measure)

    def advance(self, to_s: float) -> None:
        """Run until this time."""
        while self._due and self._due[0][0] <= to_s:
            self.now_s, _, action = heapq.heappop(self._due)
            action()
            self.state.remember(self.now_s)
        self.now_s = to_s

    def happen(self, what: str) -> None:
        """Apply a line of the script: the state of the link, or the role of the last decode instance."""
        if what in PATH_STATES:
            self._wan_path = PATH_STATES[what]
            held, self._held = (self._held, []) if what == "restore" else ([], self._held)
            for action in held:
                self._at(self.now_s, action)
        elif what in ("panic", "calm"):
            self._panic = what == "panic"
        else:
            self._change = what
            if what == "switch_role":
                self.state.decided(SwitchRole(self._changing, "prefill"), self.now_s)

    def load(self) -> GatewayStatus:
        """Return the current gauges."""
        learned = self._cores[self._policy].learned(self.now_s)
        assert learned is not None
        return GatewayStatus(
            in_flight=sum(core.in_flight for core in self._cores.values()),
            connections=64,
            oracle=OracleLoad(
                source="push",
                age_s=self.now_s % 1.0,
                congestion=(0.0, 0.08, 0.31, 0.62, 0.0),
                learned_ratio=(None, 0.97, 0.84, 0.55, None),
            ),
            foresight=ForesightLoad(policy="foresight", tiers=learned),
            offload=self._offload() if self.cluster.file.wan else None,
            panics=(
                PanicLoad(model="llama-3-70b", role="prefill", active=False, available=4, instances=4),
                PanicLoad(model="llama-3-70b", role="decode", active=self._panic, available=3, instances=12),
            ),
            instances=tuple(self._instance(instance.name, instance.role) for instance in self.cluster.instances),
        )

    def _offload(self) -> OffloadLoad:
        up = self._wan_path == "closed"
        site = SiteLoad(
            name="prefill-site",
            threshold_tokens=THRESHOLD_TOKENS * (1.0 if up else 1.21),
            base_tokens=THRESHOLD_TOKENS,
            open=up,
            wan_path=self._wan_path,
            utilisation=0.4,
            others=0.0,
            bytes_per_s=12.5e9,
            backlog_bytes=0.0,
            backlog_s=0.0,
        )
        changing = RoleSwitchLoad(instance=self._changing, role="prefill", stage="draining")
        review = ReviewLoad(
            at=10.0,
            verdict="switch_role",
            rate_per_s=8.0,
            lambda_max_per_s=9.5,
            best_per_s=11.0,
            gain=0.136,
            binding="prfaas_egress",
            n_prefill=(3,),
            n_decode=(1,),
        )
        return OffloadLoad(
            sites=(site,),
            switches_roles=True,
            role_switches=(changing,) if self._change == "switch_role" else (),
            roles={self._changing: "prefill"} if self._change == "switched" else {},
            review=review,
        )

    def _instance(self, name: str, role: str) -> InstanceLoad:
        sick = self._sick.get(name)
        here = self._here[name]
        return InstanceLoad(
            name=name,
            up=sick != "down",
            breaker="open" if sick == "open" else "half-open" if sick == "half-open" else "closed",
            requests=here,
            running=here,
            prefill_pending_s=max(0.0, self._free_s[name] - self.now_s) if role != "decode" else 0.0,
            kv_used_share=min(1.0, here / 64),
            scrape_age_s=self.now_s % 1.0,
        )

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._due, (at_s, self._order, action))

    def _measure(self) -> None:
        for core in self._cores.values():
            core.handle(CongestionMeasured(self.now_s, (0.0, 0.08, 0.31, 0.62, 0.0)))
        self._at(self.now_s + 1.0, self._measure)

    def _arrive(self) -> None:
        number, at_s = self._count, self.now_s
        self._count += 1
        self._at(at_s + self._draw.expovariate(self._rate), self._arrive)
        self.state.arrived(at_s)
        if number % 97 == 96:
            reject = Reject(number, "no decode instance has room for the KV cache: decode3 comes closest")
            self.state.decided(reject, at_s)
            self.state.rejected(at_s)
            self.state.finished(at_s, 503)
            return
        policy = self._policy if number % 2 else "round-robin"
        core = self._cores[policy]
        tokens = int(self._draw.lognormvariate(7.6, 0.7))
        prefix = tuple(range(self._draw.randrange(40) * 1000, tokens // 16))
        request = Request(id=number, input_tokens=tokens, blocks=prefix, max_output_tokens=400)
        for decision in core.handle(Arrived(at_s, request)):
            self.state.policy = policy
            self.state.decided(decision, at_s)
            self.state.policy = self._policy
            if isinstance(decision, Prefill):
                name = decision.instance
                self._here[name] += 1
                self._free_s[name] = max(self._free_s[name], at_s) + 0.02 + 9e-5 * tokens
                self._at(self._free_s[name], partial(self._prefilled, policy, number, name, at_s))

    def _prefilled(self, policy: str, number: int, source: str, arrived_s: float) -> None:
        self._here[source] -= 1
        core, now_s = self._cores[policy], self.now_s
        for decision in core.handle(PrefillFinished(now_s, number)):
            self.state.policy = policy
            self.state.decided(decision, now_s)
            self.state.policy = self._policy
            if isinstance(decision, Decode):
                took_s = decision.kv_bytes / float(self.cluster.tier_bytes_per_s[decision.tier]) * 1.6 + 0.004
                self.state.transfer_started(decision, now_s, took_s)
                self._here[decision.target] += 1
                landed = partial(self._transfer_finished, policy, decision, arrived_s, now_s)
                if decision.tier == CROSS_DATACENTER and self._wan_path != "closed":
                    self._held.append(landed)
                else:
                    self._at(now_s + took_s, landed)

    def _transfer_finished(self, policy: str, decision: Decode, arrived_s: float, started_s: float) -> None:
        now_s, core = self.now_s, self._cores[policy]
        core.handle(TransferFinished(now_s, decision.request_id))
        core.handle(Admitted(now_s, decision.request_id))
        self.state.transfer_ended(decision.request_id, now_s)
        ttft = TtftBreakdown(0.001, started_s - arrived_s, now_s - started_s, 0.0131)
        self.state.first_token(ttft, now_s, tier=decision.tier, kv_bytes=decision.kv_bytes, policy=policy)
        self.metrics.first_token("vllm", ttft, ("request_id", str(decision.request_id)))
        self._at(now_s + self._draw.uniform(2.0, 9.0), partial(self._finish, policy, decision))

    def _finish(self, policy: str, decision: Decode) -> None:
        self._here[decision.target] -= 1
        self._cores[policy].handle(Finished(self.now_s, decision.request_id))
        self.state.finished(self.now_s, 200)
        self.metrics.finished("/v1/completions", 200, 5.0)


def simulated_cluster(pods: int, racks: int, nodes: int, name: str = "prefill-x") -> ClusterFile:
    """Return a fat tree of 8-GPU nodes with two instances each, every fourth of them for prefill; the first one has
    this name."""
    count = pods * racks * nodes * 2
    file = fat_tree(
        f"{count} instances",
        pods=pods,
        racks_per_pod=racks,
        nodes_per_rack=nodes,
        oversubscription=(2.0, 2.0),
        instances=InstanceCounts(prefill=1, decode=count - 1),
    )
    plain = build(file).file
    assert isinstance(plain.instances, list)
    entries = [
        msgspec.structs.replace(
            entry,
            name=name if k == 0 else f"{'decode' if k % 4 else 'prefill'}{k:03}",
            role="decode" if k % 4 else "prefill",
        )
        for k, entry in enumerate(plain.instances)
    ]
    return msgspec.structs.replace(plain, instances=entries)


async def serve(feed: Feed) -> None:
    """Run at the speed of the wall clock until standard input ends."""
    feed.advance(12.0)
    parts = AdminParts(
        state=feed.state, page=feed.metrics.whole_page, now=lambda: feed.now_s, ready=lambda: "", version="0.1.0"
    )
    admin = Admin(parts)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def on_end() -> None:
        line = sys.stdin.readline()
        if line:
            feed.happen(line.strip())
        else:
            ended.set()

    loop.add_reader(sys.stdin, on_end)
    print(await admin.start("127.0.0.1", 0), flush=True)  # noqa: T201
    while not ended.is_set():
        feed.advance(feed.now_s + STEP_S)
        await asyncio.sleep(STEP_S)
    await admin.close()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    acting = arguments.pop(0) if arguments[0] == "foresight" else "netkv"
    if arguments[0] == "two":
        away, prefill, decode = (int(text) for text in arguments[1:4])
        file = two_datacenters(prefill_nodes=away, local_prefill_nodes=prefill, decode_nodes=decode)
        asyncio.run(serve(Feed(file, float(arguments[4]), acting)))
    else:
        pods, racks, nodes = (int(text) for text in arguments[:3])
        asyncio.run(serve(Feed(simulated_cluster(pods, racks, nodes, *arguments[4:5]), float(arguments[3]), acting)))

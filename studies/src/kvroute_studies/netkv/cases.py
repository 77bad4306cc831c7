"""NetKV's seven experiments (VI-C to VI-I) as data."""

from __future__ import annotations

from kvroute_studies.shared.cells import Experiment

PROFILES = ("chatbot", "rag", "long-context")
LADDER = ("cla", "netkv-topo", "netkv-static", "netkv")

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            name="netkv-load",
            title="Load sweep",
            source="NetKV VI-C, Table II",
            axes={"load": (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5)},
            policies=("round-robin", "load-aware", "cache-aware", "cla", "netkv-static", "netkv"),
            profiles=PROFILES,
            expectation="mean TTFT of NetKV below CLA* below round-robin at every load, most in a busy network",
        ),
        Experiment(
            name="netkv-context",
            title="Context length sweep",
            source="NetKV VI-D, Table III",
            axes={"tokens": (1024, 2048, 4096, 8192, 16384, 32768, 65536)},
            policies=("round-robin", "cache-aware", "cla", "netkv"),
            profiles=PROFILES,
            expectation="the gain over CLA* grows with the context until the cluster is overloaded",
        ),
        Experiment(
            name="netkv-topology",
            title="Topology sensitivity",
            source="NetKV VI-E, Figure 1",
            axes={"oversubscription": (1, 2, 4, 8), "background": (0.0, 0.05, 0.1, 0.2, 0.4)},
            policies=("cla", "netkv-static", "netkv"),
            profiles=PROFILES,
            expectation="the gain grows with oversubscription and with background traffic",
        ),
        Experiment(
            name="netkv-staleness",
            title="Oracle staleness",
            source="NetKV VI-F, Figure 2",
            axes={"refresh_s": (0.1, 0.5, 1, 5, 10, 30, 60)},
            policies=("cla", "netkv-static", "netkv"),
            profiles=PROFILES,
            expectation="no change from 0.1 s to 60 s",
        ),
        Experiment(
            name="netkv-prefix",
            title="Prefix sharing",
            source="NetKV VI-G, Figure 3",
            axes={"p_share": (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)},
            policies=("cache-aware", "cla", "netkv"),
            profiles=PROFILES,
            expectation="the gain over CLA* stays about the same",
        ),
        Experiment(
            name="netkv-ablation",
            title="Ablation ladder",
            source="NetKV VI-H, Figure 4, Table IV",
            axes={},
            policies=LADDER,
            profiles=PROFILES,
            expectation="the static tier map gives most of the gain, each further step a little more",
        ),
        Experiment(
            name="netkv-scale",
            title="Scalability",
            source="NetKV VI-I, Figure 5, Table V",
            axes={"gpus": (64, 128, 256, 512, 1024)},
            policies=("cla", "netkv"),
            profiles=PROFILES,
            expectation="the gain is the same at every size",
        ),
    )
}

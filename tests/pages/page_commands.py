"""How each command of the pages is tested: run here, run by another test, or not run because of what it needs.

A command of `kvroute` that is not listed is run, and its output compared. It ends, needs no other machine and takes a
second or two; otherwise it is listed. Other commands are always listed. The longest prefix counts, and one of the page
before one of `ANYWHERE`."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from tests.pages.page_blocks import Command


@dataclass(frozen=True, slots=True)
class Run:
    """Run in the folder of the page; the exit code is 0."""

    options: str = ""
    """Added to make it short; a command with an output has none."""
    columns: int = 80
    """Width of the terminal."""
    tolerance: float = 0.0
    """Largest relative difference between a number of the page and of the output; 0: both have the same digits."""
    part: bool = False
    """The page shows some of the lines."""
    printed: bool = True
    """The block after the command is its output."""
    new: str = ""
    """A file that must not exist."""
    instead: str = ""
    """The command that runs."""
    picture: tuple[str, str] | None = None
    """A file that it draws, and the picture of docs/ that is to be equal."""
    live: bool = False
    """`make live` runs it, because it takes more than a few seconds or needs a running gateway."""
    alone: bool = False
    """`make live` runs nothing beside it."""


@dataclass(frozen=True, slots=True)
class Service:
    """Start it on free ports, wait for the line with `last`, and run the page's later commands beside it.

    The page shows the last lines up to that one."""

    last: str = "dashboard and metrics: "
    options: str = "--port 0 --admin-port 0"
    tolerance: float = 0.0


@dataclass(frozen=True, slots=True)
class OtherTest:
    """Another test runs it: `file::function` below tests/. It has the subcommand, or `word`, or reads the page."""

    test: str
    word: str = ""


@dataclass(frozen=True, slots=True)
class Needs:
    """Not run, because it needs this. The options of `kvroute` are parsed."""

    what: str


Treatment: TypeAlias = Run | Service | OtherTest | Needs

_PACKAGES = Needs("packages from an index, and root or the user's own folders")
_CLUSTER = Needs(
    "a Kubernetes cluster with a Helm release of this chart, whose objects tests/kube/deploy renders and checks"
)
_GPU = Needs("vLLM on a GPU; test_vllm_page.py compares the addresses, tests/live/vllm starts vLLM with these options")
_HOURS = Needs("minutes to hours of CPU")
_PEER = OtherTest("live/test_peer_options.py::test_each_option_of_the_peer_has_a_row")
_AGENTS = OtherTest("pages/test_rig_outputs.py::test_the_table_of_an_agent")
_DOCTOR = OtherTest("doctor/test_doctor_cli.py::test_a_healthy_cluster_exits_with_0_and_fits_80_columns")
_EXTENDING = "pages/test_extending.py::"
_ENVOY = OtherTest("live/test_envoy.py::test_whole_and_streamed_responses_and_long_bodies", "envoy")
_PICKER = OtherTest("epp/test_epp_command.py::test_the_command_serves_emulated_engines_until_sigterm")
_CHECK = OtherTest("pages/test_rig_outputs.py::test_the_check_of_a_kubernetes_cluster")
_TIMES = OtherTest("cli/test_timing_measure.py::test_it_prints_a_block_of_a_cluster_file")
_SWITCH = OtherTest("pages/test_rig_outputs.py::test_the_first_line_and_the_status_of_a_switch")
_SHORT = Run("--requests 60 --seeds 1 --workers 1")

ANYWHERE: dict[str, Treatment] = {
    "make ": Needs("this suite, or minutes; tests/test_project.py compares the targets"),
    "source ": Needs("the environment that the line before it makes"),
    "python3 -m venv": _PACKAGES,
    "vllm serve": _GPU,
    "export ": _GPU,
    "kubectl ": _CLUSTER,
    "helm ": _CLUSTER,
    "docker ": OtherTest("live/test_container.py::test_the_gateway_serves_and_its_health_check_passes"),
    "kvroute experiment ": _HOURS,
    "kvroute doctor": _DOCTOR,
    "kvroute timing measure": _TIMES,
    "kvroute kube check": _CHECK,
    "kvroute serve --kubernetes": OtherTest("live/test_kubernetes.py::test_without_a_cluster_file"),
    "kvroute serve live.yaml": Service(),
    "kvroute serve my-cluster.yaml": Service(),
    "kvroute serve --embedded": Service(),
    "kvroute switch": _SWITCH,
}

BY_PAGE: dict[str, dict[str, Treatment]] = {
    "README.md": {
        "make demo": Run(
            instead="kvroute demo examples/fat-tree-64gpu.yaml --out demo-results",
            tolerance=0.1,
            part=True,
            live=True,
            alone=True,
        ),
        "kvroute simulate": Run(live=True),
        "kvroute topology expand": Run(new="my-cluster.yaml"),
    },
    "docs/agents.md": {
        "kvroute scheduler": _AGENTS,
        "kvroute agent": _AGENTS,
        "openssl": Run(live=True),
        "echo ADDRESS": Needs("root; tests/test_deploy.py compares the units with this page"),
        "printf": Needs("root; tests/test_deploy.py compares the units with this page"),
        "install": Needs("root; tests/test_deploy.py compares the units with this page"),
        "useradd": Needs("root; tests/test_deploy.py compares the units with this page"),
        "systemctl": Needs("root; tests/test_deploy.py compares the units with this page"),
    },
    "docs/autoscaling.md": {
        "kvroute plan replicas": Run(columns=120, part=True),
        "#!/bin/sh": _CLUSTER,
    },
    "docs/data-parallel.md": {"kvroute simulate": Run(live=True)},
    "docs/deploy.md": {
        "/opt/kvroute/bin/": _PACKAGES,
        "groupadd": _PACKAGES,
        "install": _PACKAGES,
        "systemctl": Needs("root and systemd; tests/live/test_systemd.py checks the unit"),
        "promtool": OtherTest("live/test_alerts.py::test_promtool_accepts_configuration_and_rules"),
    },
    "docs/development.md": {".venv/bin/pytest": Needs("this suite")},
    "docs/discovery.md": {"mv": Run(live=True)},
    "docs/doctor.md": {
        "kvroute doctor": OtherTest("pages/test_rig_outputs.py::test_the_doctor_on_emulated_engines"),
    },
    "docs/dualpath.md": {
        "kvroute plan dualpath": Run(columns=120, part=True),
        "kvroute plan dualpath examples/dualpath-660b.yaml --out": Run(
            picture=("plan/figures/rates.png", "docs/images/dualpath.png")
        ),
        "kvroute buffer": OtherTest("cli/test_cli_buffer.py::test_it_is_ready_answers_and_ends"),
    },
    "docs/emulate.md": {"kvroute emulate": Service('"instances"', "", tolerance=inf)},
    "docs/envoy.md": {
        "kvroute epp examples/small.yaml": _PICKER,
        "kvroute epp cluster.yaml": _PICKER,
        "kvroute epp cluster.yaml --port 9002 --print": Run(),
        "kvroute epp --kubernetes": OtherTest(
            "live/test_inference_pool.py::test_pods_of_a_pool_come_and_go_under_load"
        ),
        "kvroute epp --kubernetes --pool llm/my-pool --port 9002 --print": Run(),
        "kvroute epp --kubernetes --pool llm/my-pool --fail open": Run(),
        "envoy": _ENVOY,
        "curl": _ENVOY,
        "kubectl": OtherTest(
            "kube/deploy/test_picker_rights.py::test_a_picker_uses_exactly_the_rights_of_its_roles", "kvroute-picker"
        ),
    },
    "docs/experiments.md": {
        "kvroute experiment netkv-load --cell": Run(),
        "kvroute experiment never-worse-matrix --cell": Run(),
        "kvroute experiment prfaas-case-study --cell": Run(live=True),
    },
    "docs/extending.md": {
        "kvroute simulate examples/small.yaml --policy most-room": OtherTest(
            f"{_EXTENDING}test_a_new_policy_routes_a_simulated_cluster"
        ),
        "kvroute simulate examples/small.yaml --policy fewest": OtherTest(
            f"{_EXTENDING}test_a_new_policy_with_state_sees_its_state"
        ),
        "kvroute simulate examples/small.yaml --policy netkv --prefill-policy": OtherTest(
            f"{_EXTENDING}test_a_new_feature_is_offered_and_attached_as_the_core_calls_it"
        ),
        "kvroute experiment": OtherTest(f"{_EXTENDING}test_a_new_experiment_is_listed_and_its_axis_is_applied"),
    },
    "docs/fidelity.md": {
        "python -m bench": _HOURS,
        "python bench/fidelity/gpu_steps.py": Needs("a GPU"),
    },
    "docs/heroserve.md": {
        "kvroute experiment heroserve-latency --cell": Run(live=True),
        "kvroute experiment heroserve-ina-throughput": Run(
            live=True,
            picture=(
                "results/paper/generated/heroserve-ina-throughput/figures/ina-throughput.png",
                "docs/images/heroserve-ina-throughput.png",
            ),
        ),
    },
    "docs/http-api.md": {"curl": Run(live=True)},
    "docs/install.md": {
        "git clone": _PACKAGES,
        "cd ": _PACKAGES,
        "~/kvroute/bin/pip": _PACKAGES,
        "uv tool": _PACKAGES,
        "pipx": _PACKAGES,
    },
    "docs/kubernetes.md": {
        "kvroute serve live.yaml --kubernetes": OtherTest("live/test_kubernetes.py::test_pods_come_and_go_under_load"),
    },
    "docs/kubernetes-operator.md": {".venv/bin/python -m tests.kube.conformance": _CLUSTER},
    "docs/metrics.md": {"curl": Run(live=True)},
    "docs/placement.md": {
        "kvroute plan placement": Run(
            columns=120, part=True, picture=("placement/figures/placement.png", "docs/images/placement.png")
        ),
    },
    "docs/plan.md": {"kvroute plan prfaas": Run(columns=120, part=True)},
    "docs/prefix-cache.md": {"kvroute simulate": _SHORT},
    "docs/qos.md": {"kvroute plan qos examples/superpod.yaml --link": Run(part=True)},
    "docs/quickstart.md": {"kvroute simulate": Run(live=True), "curl": Run(live=True)},
    "docs/scale.md": {
        "kvroute serve cluster.yaml --workers": OtherTest(
            "serve/workers/test_workers.py::test_requests_go_to_all_workers_and_are_counted_once"
        ),
        "kvroute simulate": _SHORT,
        "curl": OtherTest("pages/test_rig_outputs.py::test_the_exchange_of_a_gateway"),
    },
    "docs/serve.md": {
        "curl http://127.0.0.1:8080": Run(live=True),
        "curl -X POST http://127.0.0.1:PORT/emulator/wan": OtherTest(
            "emulator/test_wan.py::test_a_cut_wan_path_stalls_transfers_until_it_is_restored", "emulator/wan"
        ),
        "kvroute topology": Run(new="my-cluster.yaml"),
        "while": Needs("the user to end it"),
        "kvroute simulate": Run("--seeds 1 --workers 1"),
    },
    "docs/simulate.md": {
        "kvroute simulate my-cluster.yaml --trace": Run("--seeds 1 --workers 1"),
        "kvroute simulate examples/fat-tree-64gpu.yaml": Run(
            columns=104, live=True, picture=("results/figures/ttft-breakdown.png", "docs/images/ttft-breakdown.png")
        ),
        "kvroute topology show": Run(
            instead="kvroute topology show examples/fat-tree-64gpu.yaml --png fat-tree.png",
            picture=("fat-tree.png", "docs/images/fat-tree-64gpu.png"),
        ),
        "kvroute simulate examples/dualpath.yaml": Run("--seeds 1 --workers 1"),
        "kvroute simulate examples/two-datacenters.yaml": _SHORT,
        "kvroute timing from aiconfigurator": OtherTest(
            "cli/test_timing_aiconfigurator.py::test_the_library_has_a_real_engine"
        ),
        "kvroute timing fit": OtherTest("cli/test_timing_fit.py::test_reports_give_a_timing_its_errors_and_its_range"),
        "kvroute timing from layers": OtherTest(
            "cli/test_timing_layers.py::test_a_timing_is_printed_with_its_error_and_range"
        ),
    },
    "docs/switch.md": {
        "KVROUTE_ALL_REDUCE": _GPU,
        "sudo kvroute switch": OtherTest("live/test_switch_in_kernel.py::test_jobs_share_the_slots_and_give_them_back"),
    },
    "docs/switching.md": {
        "vllm-router": _PEER,
        "smg launch": _PEER,
        "epp": Needs("llm-d in a Kubernetes cluster"),
        "pd-sidecar": Needs("llm-d in a Kubernetes cluster"),
        "export": Needs("NVIDIA Dynamo with GPUs"),
        "python -m dynamo": Needs("NVIDIA Dynamo with GPUs"),
    },
    "docs/testbed.md": {
        "sudo kvroute testbed run": OtherTest("live/test_kernel_network.py::test_run_compares_and_cleans_up"),
        "sudo kvroute testbed": OtherTest(
            "live/test_kernel_network.py::test_up_serves_requests_and_down_removes_everything"
        ),
    },
    "docs/vllm.md": {
        "kvroute serve vllm-tp8.yaml": _GPU,
        "curl -s http://10.0.0.2:8000": OtherTest(
            "serve/telemetry/test_connector_counters.py::test_the_counters_of_each_connector_are_read", "nixl_"
        ),
    },
    "docs/workloads.md": {
        "kvroute simulate my-cluster.yaml --trace": Run("--seeds 1 --workers 1", printed=False),
    },
}

EMBEDDED = "kvroute serve --embedded examples/small.yaml"
WITH_GATEWAY = ("docs/http-api.md", "docs/metrics.md")
"""Pages that assume a running gateway, which is `EMBEDDED`."""

_LOG = "kvroute simulate my-cluster.yaml --policy foresight --seeds 1 --requests 40 --log"
BEFORE: dict[str, tuple[str, ...]] = {
    "README.md": ("for port in $(seq 18000 18015); do echo http://127.0.0.1:$port; done > engines.txt",),
    "docs/discovery.md": ("cp engines.yaml engines.yaml.new",),
    "docs/envoy.md": ("cp my-cluster.yaml cluster.yaml",),
    "docs/serve.md": (f"{_LOG} decisions.jsonl",),
    "docs/simulate.md": (
        "kvroute trace generate my-trace.jsonl.zst --requests 60 --rate 2",
        "printf 'tokens,seconds\\n100,0.03\\n200,0.04\\n400,0.06\\n' > my-profile.csv",
    ),
    "docs/workloads.md": (
        "kvroute trace generate conversation_trace.jsonl.zst --requests 60 --rate 2",
        f"{_LOG} live.log",
    ),
}
"""Commands that make files which a page assumes, besides those of `page_check.prepared`."""

FILES: dict[str, dict[str, str]] = {
    "docs/discovery.md": {"live.yaml": "name: live", "engines.yaml": "- {name: prefill0"},
}
"""Files that a page shows: name, and first words of the block."""

PRINTED_BY: dict[tuple[str, str], str] = {
    ("docs/placement.md", "... The published"): (
        "kvroute plan placement examples/heroserve-testbed.yaml --model opt-66b --ttft 2.5s --tpot 150ms "
        "--equations literal"
    ),
}
"""Blocks apart from a command: page, first words, and the command that prints these lines among others."""

_FORMULA = "a formula"
_FILE_LINE = "a line of a cluster file"
NOT_PRINTED: dict[tuple[str, str], str] = {
    ("README.md", "                      which instances?"): "a drawing",
    ("docs/agents.md", "no scheduler at"): "log lines at a failure: tests/cli/test_cli_agents.py",
    (
        "docs/cluster-file.md",
        "my-cluster.yaml:4: racks",
    ): "errors in a file that is not shown: tests/topology/test_topology_check.py",
    ("docs/cluster-file.md", "my-cluster.yaml:16: defaults"): "the same of tests/timing/test_plausibility.py",
    (
        "docs/cluster-file.md",
        "my-cluster.yaml:21: gateway.parameters",
    ): "tests/cli/test_renamed.py",
    ("docs/doctor.md", " engine"): "tests/pages/test_rig_outputs.py compares it",
    ("docs/policies.md", "transfer_s"): _FORMULA,
    ("docs/policies.md", "gateway: {"): _FILE_LINE,
    ("docs/policies.md", "beyond_s"): _FORMULA,
    ("docs/policies.md", "lone_bytes_per_s"): _FORMULA,
    ("docs/policies.md", "gain *"): _FORMULA,
    ("docs/simulate.md", "my-cluster.yaml: not modelled"): "a remark: tests/cli/test_cli_simulate_gateway.py",
    ("docs/tenants.md", "rate("): "a query of Prometheus",
    ("docs/vllm.md", "{"): "a field of a request",
}
"""Blocks without a language that no command of the pages prints: page, first words, reason."""


def treatment(command: Command) -> Treatment | None:
    """Return how a command is tested; None: it must be listed, and is not."""
    for table in (BY_PAGE.get(command.page, {}), ANYWHERE):
        prefixes = [prefix for prefix in table if command.text.startswith(prefix)]
        if prefixes:
            return table[max(prefixes, key=len)]
    return Run() if command.arguments[0] == "kvroute" else None

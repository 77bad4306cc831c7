"""`kvroute topology`: checks a cluster file, prints its schema, and shows it as a tree, a tier matrix and a picture."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import msgspec
import typer

from kvroute.cli.kube.options import (
    KUBERNETES,
    Context,
    Kubeconfig,
    Namespace,
    Selector,
    kubernetes_overlay,
)
from kvroute.cli.output import check_writable, console, own_command, print_json, tell
from kvroute.cli.quantities import listed
from kvroute.cli.topology.expand import expand_file
from kvroute.types import TRAITS, InputError, InputErrors, KvProtocol

if TYPE_CHECKING:
    from kvroute.topology import Cluster
    from kvroute.topology.drafts.kubernetes_overlay import KubernetesOverlay

app = typer.Typer(
    name="topology", help="Write, check and show a cluster file.", no_args_is_help=True, rich_markup_mode="rich"
)

app.command("expand")(expand_file)

_SEVERAL = "several: repeat the option, or separate them by commas"

File = Annotated[Path, typer.Argument(help="The cluster file (YAML).", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else to stdout.")]


@app.command()
def check(
    file: File,
    as_json: AsJson = False,
    write: Annotated[
        bool, typer.Option("--write", help="First rename keys of the previous version in the file; all else stays.")
    ] = False,
) -> None:
    """Report every error of a cluster file with its line and field; sections `qos`, `placement` and `gateway` included.

    Exit code: 0 no error, 2 there is one. Missing key files, certificates, tokenizers and environment variables of this
    machine are printed and are no error, since another machine may serve the file. Endpoints are checked if an instance
    has one.

    Example: [bold]kvroute topology check examples/fat-tree-64gpu.yaml[/bold]
    """
    from kvroute.cli.topology.shown import counts
    from kvroute.topology.reading.assembly import NO_INSTANCES

    if write:
        _rename_keys(file)
    try:
        cluster, here = _checked(file)
    except InputError as error:
        problems = error.problems if isinstance(error, InputErrors) else (error,)
        if as_json:
            print_json({"file": str(file), "ok": False, "faults": [_fault(problem) for problem in problems]})
        for problem in problems:
            typer.echo(str(problem), err=True)
        typer.echo(f"{len(problems)} error{'s' if len(problems) > 1 else ''} in {file}", err=True)
        raise typer.Exit(2) from None
    tell(cluster.remarks)
    tell(f"on this machine `kvroute serve` would refuse the file: {fault}" for fault in here)
    found = counts(cluster)
    if as_json:
        refused = [_fault(fault) for fault in here]
        print_json({"file": str(file), "ok": True, "faults": [], "counts": found, "refused_here": refused})
        return
    words = (f"{count} {noun[:-1] if count == 1 and noun.endswith('s') else noun}" for noun, count in found.items())
    if not cluster.instances:
        typer.echo(f"OK: {cluster.name}: {NO_INSTANCES}")
        return
    live = any(instance.endpoint for instance in cluster.instances)
    rest = "" if live else "; no instance has an endpoint, so `kvroute serve` needs --embedded"
    typer.echo(f"OK: {cluster.name}: {', '.join(words)}{rest}")


@app.command()
def new(
    prefill: Annotated[
        list[str] | None, typer.Option(help=f"Address of a prefill engine, http://host:port; {_SEVERAL}.")
    ] = None,
    decode: Annotated[list[str] | None, typer.Option(help=f"Address of a decode engine; {_SEVERAL}.")] = None,
    both: Annotated[list[str] | None, typer.Option(help=f"Address of an engine for both; {_SEVERAL}.")] = None,
    model: Annotated[str, typer.Option(help="A model that `kvroute llm` lists, or a config.json.")] = "llama-3-70b",
    protocol: Annotated[str, typer.Option(help=f"KV transfer protocol: {', '.join(TRAITS)}.")] = "vllm",
    tp: Annotated[int, typer.Option(min=1, help="GPUs per engine.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, max=1024, help="GPUs per host.")] = 8,
    nic: Annotated[str, typer.Option(help="Bandwidth of each GPU's NIC.")] = "100 Gbps",
    name: Annotated[str, typer.Option(help="Name of the cluster.")] = "my-cluster",
    kubernetes: Annotated[
        bool,
        typer.Option(
            "--kubernetes",
            help="Take engines, nodes and their places from a Kubernetes cluster.",
            rich_help_panel=KUBERNETES,
        ),
    ] = False,
    namespace: Namespace = None,
    selector: Selector = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    out: Annotated[Path | None, typer.Option(help="File to write; default: stdout.", show_default=False)] = None,
) -> None:
    """Write a first cluster file for engines that already run; the file marks the values to change.

    With --kubernetes, --model and --tp are for engines that do not tell theirs, and --gpus is the least for a node.

    Example: [bold]kvroute topology new --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000[/bold]
    or [bold]kvroute topology new --kubernetes --namespace llm --out cluster.yaml[/bold]
    """
    from kvroute.llm import model as find_model
    from kvroute.topology import parse
    from kvroute.topology.drafts.draft import draft
    from kvroute_engine.files.units import bandwidth_bytes_per_s

    overlay = kubernetes_overlay(namespace, selector, kubeconfig, context, asked=kubernetes)
    if overlay is not None and (prefill or decode or both):
        what = "--kubernetes finds the engines itself"
        raise InputError(what, where="--kubernetes", hint="leave out --prefill, --decode and --both")
    if protocol not in get_args(KvProtocol):
        hint = f"choose one of {', '.join(get_args(KvProtocol))}"
        raise InputError(f"there is no protocol {protocol!r}", where="--protocol", hint=hint)
    try:
        find_model(model)
    except InputError as error:
        raise InputError(error.what, where=f"--model: {error.where}".removesuffix(": "), hint=error.hint) from None
    try:
        nic_bytes_per_s = bandwidth_bytes_per_s(nic)
    except InputError as error:
        raise InputError(error.what, where="--nic", hint=error.hint) from None
    if overlay is not None:
        text = _kubernetes_draft(overlay, name, model=model, tp=tp, gpus_per_node=gpus, nic_bytes_per_s=nic_bytes_per_s)
    else:
        text = draft(
            name,
            listed(prefill),
            listed(decode),
            listed(both),
            model=model,
            protocol=cast(KvProtocol, protocol),
            tp=tp,
            gpus_per_node=gpus,
            nic_bytes_per_s=nic_bytes_per_s,
        )
    try:
        parse(text, where=str(out or name))
    except InputErrors as errors:
        # The file does not exist yet, so line numbers would be useless to the reader.
        problems = [InputError(fault.what, where=_option(fault), hint=fault.hint) for fault in errors.problems]
        raise InputErrors(problems) from None
    _write(text, out)


def _kubernetes_draft(
    overlay: KubernetesOverlay, name: str, *, model: str, tp: int, gpus_per_node: int, nic_bytes_per_s: float
) -> str:
    """Return the text of a cluster file; engines that are left out and values to check are listed on stderr.

    Raises:
        InputError: the extra `kube` is not installed, the API server is not reachable or refuses, or no engine can be
            used.
    """
    from kvroute.topology.drafts.discovered import draft_discovered

    try:
        from kvroute.kube.api.client import Access
        from kvroute.kube.discovery.engines import DiscoverySpec, read_once
        from kvroute.kube.preflight.gateway import check_access
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", hint="pip install 'kvroute[kube]'") from None
    given = overlay.given
    access = Access(None if given.kubeconfig is None else Path(given.kubeconfig), given.context)
    options = DiscoverySpec("" if given.namespace == "*" else given.namespace, given.selector)
    asyncio.run(check_access(access, options))
    listing = asyncio.run(read_once(access, options))
    reading, failure = listing.reading, listing.nodes_failure
    text, refused = draft_discovered(
        name, reading.engines, model=model, tp=tp, gpus_per_node=gpus_per_node, nic_bytes_per_s=nic_bytes_per_s
    )
    tell([finding.sentence for finding in reading.findings])
    tell([f"{failure}; places come from labels of pods alone"] if failure else [])
    tell([f"{engine.name}: it is not ready" for engine in reading.engines if not engine.ready])
    tell([f"{engine}: it is left out: {why}" for engine, why in sorted(refused.items())])
    return text


def _write(text: str, out: Path | None) -> None:
    """Write a new file, or to stdout."""
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InputError("the file already exists", where=str(out), hint="give another file to --out") from None
    except OSError as error:
        hint = "give another file to --out"
        raise InputError(f"cannot be written ({error.strerror})", where=str(out), hint=hint) from None
    typer.echo(f"wrote {out}; next: {own_command()} topology check {out}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a cluster file, for editors that complete keys and mark errors.

    Example: [bold]kvroute topology schema > cluster.schema.json[/bold]
    """
    from kvroute.planner.placement.schema import PlacementEntry
    from kvroute.planner.qos.schema import QosEntry
    from kvroute.serve.config.settings import GatewaySettings  # its import takes a third of a second
    from kvroute.topology.json_schema import cluster_json_schema

    sections: dict[str, type[msgspec.Struct]] = {
        "qos": QosEntry,
        "placement": PlacementEntry,
        "gateway": GatewaySettings,
    }
    print_json(cluster_json_schema(sections))


@app.command()
def show(
    file: File,
    svg: Annotated[Path | None, typer.Option(help="Draw the cluster to this SVG file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the cluster to this PNG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the tree of a cluster, the tier of every prefill/decode pair, and bandwidth and latency of each tier.

    Example: [bold]kvroute topology show examples/fat-tree-64gpu.yaml --png cluster.png[/bold]
    """
    from kvroute.cli.topology.shown import document, print_cluster
    from kvroute.report.topology_figure import draw_topology  # its import of plots takes a second
    from kvroute.topology import parse
    from kvroute.topology.reading.assembly import NO_INSTANCES, read_text

    cluster = parse(read_text(file), str(file))
    tell(cluster.remarks)
    pictures = [path for path in (svg, png) if path is not None]
    for path, ending in ((svg, ".svg"), (png, ".png")):
        if path is not None:
            _check_picture(path, ending)
    if pictures and not cluster.instances:
        raise InputError(NO_INSTANCES, where=str(file), hint="list instances to draw them")
    for path in pictures:
        draw_topology(cluster, path)
        typer.echo(f"drew {path}", err=True)
    if as_json:
        print_json(document(cluster))
        return
    print_cluster(console(), cluster)


def _rename_keys(file: Path) -> None:
    """Give the keys of the previous version their present names in a cluster file, and tell which."""
    from kvroute.files.compressed_lines import written_whole
    from kvroute.topology.reading.assembly import read_text
    from kvroute_engine.files.document import with_present_names

    read_text(file)  # its errors
    with file.open(encoding="utf-8", newline="") as source:
        text = source.read()
    try:
        renamed_text, changes = with_present_names(text, str(file))
    except InputErrors:
        return  # the check reports them
    if renamed_text != text:
        with written_whole(file) as part:
            part.write_text(renamed_text, encoding="utf-8", newline="")
    tell(f"{fault.where}: {fault.what}; renamed in the file" for fault in changes)


def _checked(file: Path) -> tuple[Cluster, tuple[InputError, ...]]:
    """Return the cluster, and why a gateway on this machine would refuse the file all the same."""
    from kvroute.collectives import instance_traffic
    from kvroute.planner.qos.plan import read_qos
    from kvroute.serve.config.preflight import deployment_of, faults_here  # their import takes a third of a second
    from kvroute.topology.reading.assembly import read_text

    text = read_text(file)
    faults: tuple[InputError, ...] = ()
    try:
        cluster, settings = deployment_of(text, str(file), embedded=None, environ=None)
    except InputErrors as error:
        faults = error.problems
    for read in (read_qos, _read_placement):
        try:
            read(text, str(file))
        except InputErrors as error:
            faults += tuple(fault for fault in error.problems if str(fault) not in map(str, faults))
    if faults:
        raise InputErrors(faults)
    instance_traffic(cluster)
    settings.control_spec().check_cluster(cluster)
    return cluster, faults_here(text, str(file))


def _read_placement(text: str, source: str) -> None:
    from kvroute.planner.placement.schema import PlacementEntry
    from kvroute_engine.files.document import read_section

    read_section(text, source, "placement", PlacementEntry)


def _check_picture(path: Path, ending: str) -> None:
    if path.suffix != ending:
        raise InputError(f"{path} does not end in {ending}", hint=f"name the picture {path.with_suffix(ending)}")
    check_writable(path, f"--{ending[1:]}")


def _option(fault: InputError) -> str:
    """Return the option of `new` that causes an error in the draft; empty if no single one does."""
    from kvroute.topology import FileError

    return "--name" if isinstance(fault, FileError) and fault.field == "name" else ""


def _fault(problem: InputError) -> dict[str, Any]:
    from kvroute.topology import FileError

    line, field = (problem.line, problem.field) if isinstance(problem, FileError) else (0, "")
    return {"line": line, "field": field, "what": problem.what, "hint": problem.hint}

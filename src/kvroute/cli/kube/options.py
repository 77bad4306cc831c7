"""Options of commands that discover engines in Kubernetes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
import typer

from kvroute.types import InputError

if TYPE_CHECKING:
    from kvroute.topology.drafts.kubernetes_overlay import KubernetesOverlay

KUBERNETES = "Kubernetes"
FromKubernetes: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--kubernetes",
        help="Discover the engines among the pods of a Kubernetes cluster.",
        rich_help_panel=KUBERNETES,
    ),
]
Namespace: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Namespace of the engines; default: that of the own pod or the kubeconfig. '*': all.",
        rich_help_panel=KUBERNETES,
    ),
]
Selector: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Label selector of the engines, such as app=vllm; default: all.", rich_help_panel=KUBERNETES),
]
Kubeconfig: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Kubeconfig; default: the pod's service account, KUBECONFIG, ~/.kube/config.",
        rich_help_panel=KUBERNETES,
    ),
]
Context: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Context of the kubeconfig; default: the current one.", rich_help_panel=KUBERNETES),
]
Pool: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="[NAMESPACE/]NAME",
        help="InferencePool whose pods and ports are the engines, instead of --selector.",
        rich_help_panel=KUBERNETES,
    ),
]


def kubernetes_overlay(
    namespace: str | None,
    selector: str | None,
    kubeconfig: Path | None,
    context: str | None,
    pool: str | None = None,
    *,
    asked: bool,
) -> KubernetesOverlay | None:
    """Return what the options add to a cluster file; None without --kubernetes.

    Raises:
        InputError: an option has no meaning without --kubernetes, or its value is invalid.
    """
    from kvroute.topology.drafts.kubernetes_overlay import KubernetesOverlay
    from kvroute.topology.label_selector import SELECTOR_HINT, selector_fault
    from kvroute.topology.schema import KubernetesEntry

    options = {
        "namespace": namespace,
        "selector": selector,
        "kubeconfig": kubeconfig,
        "context": context,
        "pool": pool,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if not asked:
        if given:
            what = f"--{next(iter(given))} has no effect without --kubernetes"
            raise InputError(what, hint="add --kubernetes")
        return None
    if kubeconfig is not None:
        given["kubeconfig"] = str(kubeconfig.expanduser().absolute())
    if selector is not None and (fault := selector_fault(selector)):
        raise InputError(fault, where="--selector", hint=SELECTOR_HINT)
    if pool is not None:
        given |= pool_fields(pool, namespace, selector)
    try:
        return KubernetesOverlay(msgspec.convert(given, KubernetesEntry))
    except msgspec.ValidationError:  # the other options are any text
        hint = "write lower-case letters, digits and `-`, or '*' for all namespaces"
        raise InputError(f"{namespace!r} is not the name of a namespace", where="--namespace", hint=hint) from None


def pool_fields(pool: str, namespace: str | None, selector: str | None) -> dict[str, str]:
    """Return the fields of a Kubernetes source that --pool sets: `pool`, and `namespace` if the name has one.

    Raises:
        InputError: it is no name of a pool, or the other options contradict it.
    """
    from kvroute.topology.schema import NAMESPACE_NAME, OBJECT_NAME

    own, slash, name = pool.rpartition("/")
    if not re.fullmatch(OBJECT_NAME, name) or (slash and not re.fullmatch(NAMESPACE_NAME, own)):
        hint = "write NAME or NAMESPACE/NAME, in lower-case letters, digits and `-`"
        raise InputError(f"{pool!r} is not the name of an InferencePool", where="--pool", hint=hint)
    if selector is not None:
        raise InputError("--pool and --selector exclude each other", hint="leave --selector out: the pool has its own")
    if slash and namespace is not None and namespace != own:
        raise InputError(f"--pool names namespace {own}, and --namespace {namespace}", hint="leave --namespace out")
    if namespace == "*":
        raise InputError("an InferencePool is in one namespace", where="--namespace", hint="write NAMESPACE/NAME")
    return {"pool": name} | ({"namespace": own} if slash else {})


def kubernetes_arguments(
    namespace: str | None, selector: str | None, kubeconfig: Path | None, context: str | None, *, asked: bool
) -> list[str]:
    """Return the same options for another process."""
    options = {"namespace": namespace, "selector": selector, "kubeconfig": kubeconfig, "context": context}
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return ["--kubernetes", *given] if asked else []

"""Reconciles of a model cluster, and what they leave."""

from __future__ import annotations

from tests.kube.operator.cluster_model import ClusterModel
from tests.kube.resources.router_examples import Manifest

from kvroute.kube.operator.actions import Action
from kvroute.kube.operator.reconcile import reconcile

NOW_S = 1.8e9


def run(cluster: ClusterModel, now: float = NOW_S, rounds: int = 8) -> list[Action]:
    """Reconcile until nothing is left to do; return all actions."""
    done: list[Action] = []
    for _ in range(rounds):
        actions = reconcile(cluster.snapshot(), now)
        if not actions:
            return done
        done += actions
        cluster.execute(actions)
        cluster.settle()
    raise AssertionError(actions)


def conditions(cluster: ClusterModel) -> dict[str, tuple[str, str, str]]:
    """Return status, reason and message of each condition."""
    found = cluster.get("KvRouter", "chat")["status"]["conditions"]
    return {condition["type"]: (condition["status"], condition["reason"], condition["message"]) for condition in found}


def replaced(cluster: ClusterModel, obj: Manifest) -> None:
    """Change the spec of the KvRouter, as a user does."""
    old = cluster.get("KvRouter", "chat")
    generation = old["metadata"]["generation"] + 1
    cluster.create(old | {"spec": obj["spec"], "metadata": old["metadata"] | {"generation": generation}})

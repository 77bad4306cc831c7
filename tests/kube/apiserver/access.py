"""Authentication by bearer token, impersonation, and authorization by RBAC."""

from __future__ import annotations

import base64
import binascii
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.kube.apiserver.requests import User
from tests.kube.apiserver.resources import RBAC
from tests.kube.apiserver.status import ApiError, Object, Where
from tests.kube.apiserver.status import forbidden as refused
from tests.kube.apiserver.store import Store

MASTERS = "system:masters"
AUTHENTICATED = "system:authenticated"
ANONYMOUS = User("system:anonymous", groups=("system:unauthenticated",))
ADMIN = User("admin", "u1", (MASTERS, AUTHENTICATED))
DISCOVERY = ("/api", "/apis", "/openapi", "/version", "/healthz", "/livez", "/readyz")
PUBLIC = ("/version", "/healthz", "/livez", "/readyz")
SELF_REVIEWS = ("selfsubjectreviews", "selfsubjectaccessreviews", "selfsubjectrulesreviews")


@dataclass(frozen=True, slots=True)
class Attributes:
    """What a request wants to do to a resource."""

    verb: str
    group: str
    plural: str
    subresource: str = ""
    namespace: str = ""
    name: str = ""

    @property
    def resource(self) -> str:
        """Return the resource as RBAC rules name it."""
        return f"{self.plural}/{self.subresource}" if self.subresource else self.plural

    def sentence(self, user: User, verb: str = "") -> str:
        """Return the API server's sentence about a missing permission."""
        where = f'in the namespace "{self.namespace}"' if self.namespace else "at the cluster scope"
        text = f'User "{user.name}" cannot {verb or self.verb} resource "{self.resource}"'
        return f'{text} in API group "{self.group}" {where}'


def service_account(namespace: str, name: str, uid: str = "", token_id: str = "") -> User:
    """Return the user of a service account."""
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}", AUTHENTICATED)
    extra = {"authentication.kubernetes.io/credential-id": (f"JTI={token_id}",)} if token_id else {}
    return User(f"system:serviceaccount:{namespace}:{name}", uid, groups, extra)


@dataclass(slots=True)
class Access:
    """Users by token, and the rules that bind them."""

    store: Store
    tokens: dict[str, User] = field(default_factory=dict)

    def authenticate(self, headers: Mapping[str, str]) -> User:
        """Return the user of a request; raise ApiError 401 for an unknown token. Other schemes are anonymous."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            return ANONYMOUS
        found = self.tokens.get(token) or self._issued(token)
        if found is None:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        return found

    def issue(self, namespace: str, name: str, uid: str) -> str:
        """Return a new token of a service account. It survives a restart with the journal, as it names its owner."""
        token_id = str(uuid.uuid4())
        claims = json.dumps({"namespace": namespace, "name": name, "uid": uid, "jti": token_id})
        token = "sa." + base64.urlsafe_b64encode(claims.encode()).decode() + ".test"
        self.tokens[token] = service_account(namespace, name, uid, token_id)
        return token

    def _issued(self, token: str) -> User | None:
        """Return the user of a token that was issued before a restart, if its account still exists."""
        kind, _, rest = token.partition(".")
        if kind != "sa" or not rest.endswith(".test"):
            return None
        try:
            claims = json.loads(base64.urlsafe_b64decode(rest.removesuffix(".test")))
        except (binascii.Error, ValueError):
            return None
        held = self.store.get(("", "serviceaccounts", claims["namespace"], claims["name"]))
        if held is None or held["metadata"]["uid"] != claims["uid"]:
            return None
        return service_account(claims["namespace"], claims["name"], claims["uid"], claims["jti"])

    def impersonate(self, user: User, headers: Mapping[str, str], wanted: Attributes) -> User:
        """Return the user that the headers ask for; raise ApiError 403 without the permission."""
        name = headers.get("impersonate-user")
        if not name:
            return user
        if MASTERS not in user.groups and not self.allows(user, Attributes("impersonate", "", "users", name=name)):
            verb = f"impersonate-on:user-info:{wanted.verb}"
            where = Where(wanted.group, wanted.plural, wanted.name)
            raise refused(where, wanted.sentence(user, verb))
        kind, _, rest = name.partition("system:serviceaccount:")
        if not kind and rest:
            namespace, _, account = rest.partition(":")
            found = service_account(namespace, account)
            groups = headers.get("impersonate-group")
            return User(found.name, groups=(*groups.split(","), AUTHENTICATED)) if groups else found
        groups = headers.get("impersonate-group")
        return User(name, groups=(*(groups.split(",") if groups else ()), AUTHENTICATED))

    def allows_path(self, user: User, path: str) -> bool:
        """Return whether a user may read a path that is no resource."""
        if MASTERS in user.groups:
            return True
        open_to = DISCOVERY if AUTHENTICATED in user.groups else PUBLIC
        return any(path == prefix or path.startswith(f"{prefix}/") for prefix in open_to)

    def allows(self, user: User, wanted: Attributes) -> str:
        """Return why a user may do something, or an empty text."""
        if MASTERS in user.groups:
            return 'RBAC: allowed by ClusterRoleBinding "cluster-admin" of ClusterRole "cluster-admin"'
        if wanted.plural in SELF_REVIEWS and AUTHENTICATED in user.groups:
            return 'RBAC: allowed by ClusterRoleBinding "system:basic-user"'
        for reason, rules in self._bound(user, wanted.namespace):
            if any(rule_allows(rule, wanted) for rule in rules):
                return reason
        return ""

    def _bound(self, user: User, namespace: str) -> Iterator[tuple[str, list[Object]]]:
        """Yield the rules that are bound to a user, with the reason of a permission."""
        for kind in ("clusterrolebindings", "rolebindings"):
            for key, binding in self.store.select((RBAC, kind)):
                if kind == "rolebindings" and (not namespace or key[2] != namespace):
                    continue
                subject = next((s for s in binding.get("subjects") or [] if _is_subject(s, user, key[2])), None)
                if subject is None:
                    continue
                role = binding["roleRef"]
                plural = "roles" if role["kind"] == "Role" else "clusterroles"
                found = self.store.get((RBAC, plural, key[2] if plural == "roles" else "", role["name"]))
                shown = f"{key[3]}/{key[2]}" if key[2] else key[3]
                reason = (
                    f'RBAC: allowed by {binding["kind"]} "{shown}" of {role["kind"]} "{role["name"]}" '
                    f'to {subject["kind"]} "{subject["name"]}"'
                )
                yield reason, (found or {}).get("rules") or []

    def check_escalation(self, user: User, found: Object, namespace: str, where: Where) -> None:
        """Raise ApiError 403 if a role grants what its author does not have."""
        if MASTERS in user.groups:
            return
        missing = [rule for rule in found.get("rules") or [] if not self._holds(user, rule, namespace)]
        if missing:
            groups = " ".join(f'"{name}"' for name in user.groups)
            listed = "\n".join(_go_rule(rule) for rule in missing)
            text = f'user "{user.name}" (groups=[{groups}]) is attempting to grant RBAC permissions not currently held:'
            raise refused(where, f"{text}\n{listed}")

    def _holds(self, user: User, rule: Object, namespace: str) -> bool:
        return all(
            self.allows(user, Attributes(verb, group, *_split(plural), namespace=namespace))
            for verb in rule.get("verbs") or []
            for group in rule.get("apiGroups") or []
            for plural in rule.get("resources") or []
        )


def _split(resource: str) -> tuple[str, str]:
    plural, _, subresource = resource.partition("/")
    return plural, subresource


def _go_rule(rule: Object) -> str:
    names = (("APIGroups", "apiGroups"), ("Resources", "resources"), ("Verbs", "verbs"))
    listed = (f"{name}:[{' '.join(json.dumps(value) for value in rule.get(key) or [])}]" for name, key in names)
    return "{" + ", ".join(listed) + "}"


def _is_subject(subject: Object, user: User, namespace: str) -> bool:
    match subject["kind"]:
        case "User":
            return bool(subject["name"] == user.name)
        case "Group":
            return subject["name"] in user.groups
        case _:
            owner = subject.get("namespace") or namespace
            return user.name == f"system:serviceaccount:{owner}:{subject['name']}"


def rule_allows(rule: Object, wanted: Attributes) -> bool:
    """Return whether one RBAC rule permits an action."""
    resources = rule.get("resources") or []
    named = wanted.resource in resources or "*" in resources or f"*/{wanted.subresource}" in resources
    names = rule.get("resourceNames") or []
    return (
        named
        and not {"*", wanted.verb}.isdisjoint(rule.get("verbs") or [])
        and not {"*", wanted.group}.isdisjoint(rule.get("apiGroups") or [])
        and (not names or wanted.name in names)
    )

"""The API itself: dispatches a request for a resource to reads, writes, deletions and subresources."""

from __future__ import annotations

import uuid

from tests.kube.apiserver import bodies, patches
from tests.kube.apiserver.access import Access
from tests.kube.apiserver.crds import Definitions
from tests.kube.apiserver.decode import parse_json
from tests.kube.apiserver.deletion import Deletion
from tests.kube.apiserver.patching import Patching
from tests.kube.apiserver.reads import Reader
from tests.kube.apiserver.requests import Answer, Request
from tests.kube.apiserver.resources import Catalogue
from tests.kube.apiserver.reviews import Reviews
from tests.kube.apiserver.status import Object, forbidden, internal, not_allowed, not_found
from tests.kube.apiserver.store import Store
from tests.kube.apiserver.subresources import Subresources
from tests.kube.apiserver.types import resource_type
from tests.kube.apiserver.views import Form, to_version
from tests.kube.apiserver.watch import Watch
from tests.kube.apiserver.webhooks import Webhooks
from tests.kube.apiserver.writes import Backend, Clock, Writes

NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")


class Api:
    """Answers requests that are allowed."""

    def __init__(self, store: Store, access: Access, clock: Clock, cleanup_s: float = 0.0) -> None:
        self.catalogue = Catalogue()
        self._store = store
        self._backend = Backend(store, Webhooks(store), access, clock)
        self._definitions = Definitions(store, self.catalogue, self._backend.now, cleanup_s)
        self._reader = Reader(store)
        self._writes = Writes(self._backend)
        self._patching = Patching(store, self._writes)
        self._deletion = Deletion(self._backend)
        self._subresources = Subresources(self._backend, self._writes, self._deletion)
        self._reviews = Reviews(access, self._backend.now)

    def start(self) -> None:
        """Create what every cluster has, and serve the definitions of a journal."""
        for name in NAMESPACES:
            key = ("", "namespaces", "", name)
            if self._store.get(key) is None:
                self._seed(name)
        self._definitions.start()

    def _seed(self, name: str) -> None:
        """Create a namespace and, in it, the service account `default`."""
        now = self._backend.now()
        common = {"creationTimestamp": now}
        labels = {"kubernetes.io/metadata.name": name}
        fields: Object = {"f:metadata": {"f:labels": {".": {}, "f:kubernetes.io/metadata.name": {}}}}
        entry = {"manager": "kube-apiserver", "operation": "Update", "apiVersion": "v1", "time": now}
        managed = [{**entry, "fieldsType": "FieldsV1", "fieldsV1": fields}]
        metadata: Object = {"name": name, "uid": _uid(), **common, "labels": labels, "managedFields": managed}
        made = {"kind": "Namespace", "apiVersion": "v1", "metadata": metadata, "spec": {"finalizers": ["kubernetes"]}}
        self._store.write(("", "namespaces", "", name), {**made, "status": {"phase": "Active"}})
        metadata = {"name": "default", "namespace": name, "uid": _uid(), **common}
        account = {"kind": "ServiceAccount", "apiVersion": "v1", "metadata": metadata}
        self._store.write(("", "serviceaccounts", name, "default"), account)

    def close(self) -> None:
        """Cancel what has not happened yet."""
        self._definitions.close()

    def watch(self, request: Request, form: Form) -> Watch:
        """Return a watch; raise ApiError for its options."""
        return Watch(self._store, request, form)

    async def answer(self, request: Request, form: Form) -> Answer:
        """Answer a request; raise ApiError."""
        if self._reviews.handles(request):
            return self._reviews.answer(request)
        if request.resource.plural == "bindings" and not request.subresource:
            return await self._subresources.bind(request)
        if request.subresource:
            return await self._subresource(request, form)
        match request.verb:
            case "get":
                return self._reader.get(request, form)
            case "list":
                return self._reader.collection(request, form)
            case "create":
                self._check_definition(request)
                return await self._writes.create(request)
            case "update":
                return await self._writes.replace(request)
            case "patch":
                return await self._patching.patch(request)
            case "delete":
                return await self._deletion.delete(request)
            case _:
                return await self._deletion.collection(request)

    def _check_definition(self, request: Request) -> None:
        if request.resource.custom and self._definitions.terminating(request.resource):
            found = bodies.parse_object(request, request.resource.kind)
            name = (found.get("metadata") or {}).get("name", "")
            text = "create not allowed while custom resource definition is terminating"
            raise forbidden(request.resource.where(name), text)

    async def _subresource(self, request: Request, form: Form) -> Answer:
        subresource, writing = request.subresource, request.verb != "get"
        if request.resource.sub(subresource) is None:
            raise not_found(request.resource.where(request.name))
        if subresource == "status":
            if not writing:
                return self._reader.get(request, form)
            return await (self._patching.patch(request) if request.verb == "patch" else self._writes.replace(request))
        if subresource == "scale":
            if writing:
                return await self._subresources.write_scale(request)
            return Answer(200, self._subresources.scale(request, self._reader.find(request)))
        if subresource == "binding":
            return await self._subresources.bind(request)
        if subresource == "eviction":
            return await self._subresources.evict(request)
        if subresource == "finalize":
            return await self._subresources.finalize(request)
        if subresource == "token":
            return await self._subresources.token(request)
        if subresource == "ephemeralcontainers" and request.verb == "patch":
            held = to_version(request.resource, self._reader.find(request))
            patch = parse_json(request.body.decode(errors="replace"))
            return await self._subresources.ephemeral(
                request, patches.strategic(resource_type(request.resource), held, patch)
            )
        return self._kubelet(request)

    def _kubelet(self, request: Request) -> Answer:
        """Answer what would be passed on to a kubelet: no kubelet listens."""
        if request.subresource in ("log", "exec", "attach", "portforward"):
            self._reader.find(request)
            raise internal("no preferred addresses found; known addresses: []")
        raise not_allowed()


def _uid() -> str:
    return str(uuid.uuid4())

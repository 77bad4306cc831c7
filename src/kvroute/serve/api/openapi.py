"""The gateway's public API as an OpenAPI 3.1 document: only what the gateway itself checks and returns.

Fields that only engines interpret are not listed; they pass unchecked.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from kvroute.serve.api.json_fields import ENGINE_FIELDS, TOKENS_MAX
from kvroute.serve.api.passthrough_paths import BUILT_IN, COMPLETIONS
from kvroute.serve.api.requests import ANSWERS_MAX, IDS_MAX

Schema: TypeAlias = dict[str, Any]

_JSON, _EVENTS, _FORM = "application/json", "text/event-stream", "multipart/form-data"
_TOKEN_ID: Schema = {
    "type": "integer",
    "minimum": 0,
    "maximum": 2**63 - 1,
    "description": "Written without a decimal point or an exponent.",
}
_TOKEN_IDS: Schema = {"type": "array", "items": _TOKEN_ID}
_FLAG: Schema = {"type": ["boolean", "null"]}

_REASONS = {
    400: "The request is invalid, or the engine rejects it.",
    401: "The API key is missing or unknown.",
    403: "The engine rejects the forwarded key, or a web page of another site sent the request.",
    404: "The path or model does not exist.",
    408: "The request arrived too slowly.",
    413: "The body is too large.",
    415: "The Content-Encoding or Content-Type is not supported, or a form could be read in several ways.",
    422: "The engine rejects a field.",
    429: "This key has too many requests in progress, or has used its rate.",
    431: "The headers are too large.",
    500: "The engine failed on this request.",
    501: "The engine or the gateway does not support this function.",
    502: "The engines failed, and so did all retries.",
    503: "The gateway is full or draining, no instance is available, or the first token would come too late.",
    504: "An engine did not respond in time.",
}
_WITH_RETRY_AFTER = frozenset({429, 503})
_OF_ENGINES = (401, 403, 404, 429, 502, 503)
"""Error statuses of a page that an engine serves and that needs no request body."""


def document(version: str) -> Schema:
    """Return the OpenAPI description; `version` is the gateway's."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvroute gateway",
            "version": version,
            "description": "A gateway to engines that split prefill and decode, with the APIs of OpenAI and Anthropic.",
        },
        "security": [{}, {"key": []}, {"header": []}],
        "paths": _paths(),
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
            "responses": {f"Error{status}": _error(status) for status in _REASONS},
        },
    }


def _paths() -> Schema:
    object_of = {"type": "object"}
    return {
        "/v1/completions": _post("completion", "CompletionRequest", _ref("Answer"), streams=True),
        "/v1/chat/completions": _post("chat", "ChatRequest", _ref("Answer"), streams=True),
        "/v1/responses": _post("respond", "ResponsesRequest", object_of, streams=True),
        "/v1/responses/{response}": _stored_response(),
        "/v1/responses/{response}/cancel": {"post": _cancel(), "parameters": [_in_path("response")]},
        "/v1/messages": _post("message", "MessagesRequest", object_of, streams=True),
        **{path.decode(): _passed(path.decode()) for path in BUILT_IN if path not in COMPLETIONS},
        **{f"/v1/audio/{name}": _audio(name) for name in ("transcriptions", "translations")},
        "/v1/audio/speech": _optional_body(_post("speech", "Passed", object_of)),
        "/v1/models/{model}": _model(),
        "/v1/models": _get("models", "The models that are served.", _JSON, _ref("Models"), _OF_ENGINES),
        "/health": _get("health", "The gateway is alive.", _JSON, object_of, ()),
        "/ready": _get("ready", "The gateway accepts requests.", _JSON, object_of, (503,)),
        "/metrics": _get("metrics", "Prometheus metrics.", "text/plain", {"type": "string"}, ()),
    }


def _post(name: str, schema: str, answer: Schema, streams: bool = False) -> Schema:
    content = {_JSON: {"schema": answer}}
    if streams:
        content[_EVENTS] = {}
    what = "The engine's response" + (", as server-sent events where `stream` is true." if streams else ".")
    answers = {"200": {"description": what, "content": content}}
    body = {"required": True, "content": {_JSON: {"schema": _ref(schema)}}}
    return {"post": {"operationId": name, "requestBody": body, "responses": answers | _errors(*_REASONS)}}


def _passed(path: str) -> Schema:
    """Return a path of requests that one engine serves alone."""
    return _post(path.strip("/").replace("/", "_"), "Passed", {"type": "object"})


def _stored_response() -> Schema:
    object_of = {"type": "object"}
    page = _get(
        "stored_response", "A stored response, if its engine serves this request.", _JSON, object_of, _OF_ENGINES
    )
    deleted = _get("delete_response", "The response is deleted.", _JSON, object_of, _OF_ENGINES)["get"]
    other = _optional_body(_post("of_responses", "Passed", {"type": "object"}))  # such as /v1/responses/input_tokens
    return page | other | {"delete": deleted, "parameters": [_in_path("response")]}


def _cancel() -> Schema:
    page: Schema = _get("cancel_response", "The response is cancelled.", _JSON, {"type": "object"}, tuple(_REASONS))[
        "get"
    ]
    return page


def _audio(name: str) -> Schema:
    """Return a path that takes forms; only the field `model` is read."""
    page = _post(name, "Passed", {"type": "object"})
    about = "A form, whose field `model` is read. Names of fields have no control characters, quotes and backslashes."
    form: Schema = {"description": about}
    page["post"]["requestBody"] = {"content": {_FORM: {"schema": form}}}
    return _optional_body(page)


def _optional_body(page: Schema) -> Schema:
    """Return a path whose body the engine alone checks."""
    page["post"]["requestBody"]["required"] = False
    return page


def _get(name: str, what: str, content_type: str, schema: Schema, errors: tuple[int, ...]) -> Schema:
    answers = {"200": {"description": what, "content": {content_type: {"schema": schema}}}}
    return {"get": {"operationId": name, "responses": answers | _errors(*errors)}}


def _model() -> Schema:
    page = _get("model", "One model.", _JSON, _ref("Model"), _OF_ENGINES)
    return page | {"parameters": [_in_path("model")]}


def _in_path(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _errors(*statuses: int) -> Schema:
    return {str(status): {"$ref": f"#/components/responses/Error{status}"} for status in statuses}


def _error(status: int) -> Schema:
    answer: Schema = {"description": _REASONS[status], "content": {_JSON: {"schema": _ref("Error")}}}
    if status in _WITH_RETRY_AFTER:
        answer["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}
    return answer


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _schemas() -> Schema:
    return {
        "CompletionRequest": _completion_request(),
        "ChatRequest": _chat_request(),
        "ResponsesRequest": _conversation_request({"max_output_tokens": _count(1), "background": _FLAG}),
        "MessagesRequest": _conversation_request({"max_tokens": _count(1)}),
        "Passed": {"type": "object", "description": "Forwarded to an engine unchanged."},
        "Answer": {"type": "object", "properties": {"object": {"type": "string"}, "choices": {"type": "array"}}},
        "Models": {
            "type": "object",
            "required": ["object", "data"],
            "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _ref("Model")}},
        },
        "Model": {
            "type": "object",
            "required": ["id", "object", "created", "owned_by"],
            "properties": {
                "id": {"type": "string"},
                "object": {"const": "model"},
                "created": {"type": "integer"},
                "owned_by": {"type": "string"},
                "max_model_len": {"type": "integer", "description": "Tokens of the context, if an engine tells it."},
            },
        },
        "Error": {
            "type": "object",
            "required": ["error"],
            "properties": {
                "error": {
                    "type": "object",
                    "required": ["message", "type"],
                    "properties": {
                        "message": {"type": "string"},
                        "type": {"type": "string"},
                        "param": {"type": ["string", "null"]},
                        "code": {"type": "string"},
                    },
                }
            },
        },
    }


def _completion_request() -> Schema:
    texts = {"type": "array", "minItems": 1, "maxItems": ANSWERS_MAX, "items": {"type": "string"}}
    lists = {"type": "array", "minItems": 1, "maxItems": ANSWERS_MAX, "items": _TOKEN_IDS}
    prompt = {"anyOf": [{"type": "string"}, texts, _TOKEN_IDS | {"minItems": 1}, lists]}
    own = {"prompt": prompt, "max_tokens": _count(0), "echo": _FLAG}
    return {
        "type": "object",
        "description": f"`n` times the number of prompts is at most {ANSWERS_MAX}, and all prompts together have at "
        f"most {IDS_MAX} token ids. {_DROPPED}",
        "required": ["prompt"],
        "properties": own | _shared(),
        "if": {"properties": {"max_tokens": {"const": 0}}, "required": ["max_tokens"]},
        "then": {"properties": {"echo": {"const": True}}, "required": ["echo"]},
    }


def _chat_request() -> Schema:
    part = {"type": "object", "properties": {"type": {"type": ["string", "null"]}}}
    parts = {"type": "array", "items": {"anyOf": [{"type": "string"}, part]}}
    message = {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string"},
            "content": {"anyOf": [{"type": "string"}, parts, {"type": "null"}]},
        },
    }
    own = {
        "messages": {"type": "array", "minItems": 1, "items": message},
        "max_tokens": _count(1),
        "max_completion_tokens": _count(1),
    }
    return {"type": "object", "description": _DROPPED, "required": ["messages"], "properties": own | _shared()}


def _conversation_request(own: Schema) -> Schema:
    """Return a request whose conversation the engine checks."""
    common = {name: field for name, field in _shared().items() if name not in ("n", "best_of", "use_beam_search")}
    return {"type": "object", "description": _DROPPED, "properties": own | common}


_DROPPED = "Unknown fields are forwarded, except those that only the gateway sets: " + ", ".join(sorted(ENGINE_FIELDS))


def _shared() -> Schema:
    return {
        "model": {"type": ["string", "null"]},
        "stream": _FLAG,
        "n": _count(1, ANSWERS_MAX),
        "best_of": _count(0),
        "use_beam_search": _FLAG,
        "cache_salt": {"type": ["string", "null"], "minLength": 1},
        "vllm_xargs": {"type": ["object", "null"], "propertyNames": {"not": {"enum": sorted(ENGINE_FIELDS)}}},
    }


def _count(least: int, most: int = TOKENS_MAX) -> Schema:
    return {"type": ["integer", "null"], "minimum": least, "maximum": most}

"""`kv_connector_module_path` of older configurations of vLLM: the connector is `kvroute_engine.connector.vllm`."""

from __future__ import annotations

from kvroute_engine.connector.vllm import KvrouteConnector, log

__all__ = ["KvrouteConnector"]

log.warning(
    "kv_connector_module_path kvroute.connector.vllm is the connector's old path, which the next version removes; "
    "write kvroute_engine.connector.vllm"
)

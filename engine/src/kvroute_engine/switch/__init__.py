"""In-network aggregation in software: an all-reduce whose sums a switch computes, over UDP (SwitchML's protocol)."""

from kvroute_engine.switch.aggregator import Aggregator
from kvroute_engine.switch.client import AggregationClient, AggregationError, is_answering
from kvroute_engine.switch.worker import Worker

__all__ = ["AggregationClient", "AggregationError", "Aggregator", "Worker", "is_answering"]

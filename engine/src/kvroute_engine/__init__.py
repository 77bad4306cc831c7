"""What runs beside an inference engine, in its environment: KV connector, buffer server, block store, all-reduces,
agent, aggregation switch. It needs neither numba, scipy, matplotlib, typer nor rich."""

__version__ = "0.2.0"

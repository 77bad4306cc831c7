"""Admin server, dashboard, metrics, tracing, logs and the event log."""

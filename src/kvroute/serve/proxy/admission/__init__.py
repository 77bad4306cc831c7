"""Before a request is placed: limits, tenants, queues."""

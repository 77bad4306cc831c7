"""Several policies over several seeds on the user's cluster and trace, on all cores or on Ray: `kvroute simulate`."""

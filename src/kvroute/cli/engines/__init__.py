"""Commands for what runs beside engines: `agent`, `buffer`, `switch`, and the `scheduler` of agents."""

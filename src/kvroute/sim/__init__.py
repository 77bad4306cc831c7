"""Virtual time: the loop, prefill and decode instances, workloads and a run."""

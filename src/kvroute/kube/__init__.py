"""Kubernetes: engines discovered from pods and nodes, and topology labels for workers.

Reading pods needs no Kubernetes client; `informer` and `client` need lightkube (extra `kube`).
"""

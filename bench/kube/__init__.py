"""Discovery in Kubernetes, beside the informer of the official client."""

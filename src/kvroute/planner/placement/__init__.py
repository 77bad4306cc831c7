"""`kvroute plan placement`: which GPUs form which parallel groups, and the rate of requests that they sustain."""

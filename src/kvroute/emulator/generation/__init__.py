"""What emulated engines say: the text, the end and the tool call of each answer, and log-probabilities."""

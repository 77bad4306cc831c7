"""Commands that show why: `explain`, `replay`, `doctor`, `flows`, `llm`, `key`."""

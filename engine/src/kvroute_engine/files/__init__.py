"""Reading files that users write: every fault with its line, its field and how to mend it."""

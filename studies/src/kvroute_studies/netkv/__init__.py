"""NetKV's evaluation."""

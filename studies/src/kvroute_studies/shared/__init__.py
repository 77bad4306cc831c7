"""What all studies share: cells, their runs and records, findings, pages."""

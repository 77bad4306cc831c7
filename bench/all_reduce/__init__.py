"""All-reduces between network namespaces: a star of shaped, lossy wires, and each scheme's time against the model."""

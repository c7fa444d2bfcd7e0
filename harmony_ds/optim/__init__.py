"""Updates of weights: the user's optimizer, stepped on the host, on the device or from a disk, and its thread."""

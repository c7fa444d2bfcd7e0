"""What measures layer calls, copies and the host, or computes them from a machine's data."""

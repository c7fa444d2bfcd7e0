"""Reports of an engine after its steps, and what it logs."""

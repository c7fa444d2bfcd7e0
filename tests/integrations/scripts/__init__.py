"""Training scripts that know nothing of harmony_ds."""

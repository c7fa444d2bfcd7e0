"""A model's parameters while an engine trains it: links to their masters, optimizer state and gradients."""

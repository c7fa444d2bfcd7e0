"""The user's model while an engine trains it: its layer calls and its parameters."""

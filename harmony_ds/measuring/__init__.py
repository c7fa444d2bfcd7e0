"""Bytes, times, rows and side effects of a model, from running it layer by layer."""

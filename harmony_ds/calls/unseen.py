"""What a call does that was not seen when the model was measured."""

from __future__ import annotations

from harmony_ds.errors import ModelError


class UnseenError(ModelError):
    """A forward pass did something that it was not measured with; it is remembered, and the step can be run again."""

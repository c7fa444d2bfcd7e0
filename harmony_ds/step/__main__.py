"""Print the two tables of an optimizer step as `docs/architecture.md` has them: events, and errors."""

from harmony_ds.step import recovery, transitions
from harmony_ds.step.step import TRANSITIONS

print(transitions.as_markdown(TRANSITIONS))  # noqa: T201 - that is what the module is for
print()  # noqa: T201
print(recovery.as_markdown())  # noqa: T201

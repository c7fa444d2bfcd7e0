"""The bench's process of one engine, which can also be profiled."""

from __future__ import annotations

from typing import Any

from profile_parts import profiled

from harmony_ds.bench.child import Server


class ProfiledServer(Server):
    """Answers "profile" with seconds by part."""

    def profile(self, first: int, count: int) -> dict[str, Any]:
        groups = [self.task.batches(first + index) for index in range(count)]
        return profiled(lambda: [float(self.engine.step(group)) for group in groups])

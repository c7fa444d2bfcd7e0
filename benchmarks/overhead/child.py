"""The bench's process of one engine, which can also be profiled: {"profile": 2, "first": 6} takes two steps."""

from __future__ import annotations

from typing import Any

from profile_parts import profiled

from harmony_ds.bench.child import Server, main


class ProfiledServer(Server):
    """Answers "profile" with seconds by part."""

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        if "profile" not in command:
            return super().obey(command)
        groups = [self.task.batches(command["first"] + index) for index in range(command["profile"])]
        return profiled(lambda: [float(self.engine.step(group)) for group in groups])


if __name__ == "__main__":
    main(ProfiledServer)

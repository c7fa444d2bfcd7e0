"""From measured costs to a `Plan`: packs, tasks, memory, validation. Never imports torch."""

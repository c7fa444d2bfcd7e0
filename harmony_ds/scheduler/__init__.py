"""From measured costs to a `Plan`: packs, tasks, memory. Never imports torch."""

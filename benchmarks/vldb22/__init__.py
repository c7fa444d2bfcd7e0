"""The paper's planner, its published schedules, and what a wider search gains over them."""

"""The cost model of Harmony's scheduler (VLDB'22): tasks, bytes and simulated time of a schedule.

LayerProfile -> PackCosts;  Setup, Schedule -> tasks_of -> volumes_of, lower -> jobs -> step_ms
"""

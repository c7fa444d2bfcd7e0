"""The cost model of Harmony's scheduler (VLDB'22): task graphs, byte volumes and simulated times of a schedule.

LayerProfile -> PackCosts;  Setup, Schedule -> compose -> TaskGraph -> count_volumes, lower -> jobs -> step_ms
"""

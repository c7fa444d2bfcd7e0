"""The paper's planner (Harmony, VLDB'22): task graphs, byte volumes, simulated times and the search, for any number of
devices. A reproduction: the library plans with `harmony_ds.scheduler`, of which this uses the event kernel and the best
cuts.

LayerProfile -> PackCosts ;  Setup, Schedule -> compose -> TaskGraph -> count_volumes, lower -> jobs -> simulate
Question -> search -> Answer
"""

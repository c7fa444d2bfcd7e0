"""What layer calls, copies and the host's memory cost: measured on the device, or computed from a machine's data.

Begin with `profiler.py`: its `Profiler` calls everything else that measures, in the order that its docstring gives.
`hardware.py` and `roofline.py` compute the same for machines that are not there.
"""

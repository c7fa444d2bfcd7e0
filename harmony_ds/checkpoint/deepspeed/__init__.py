"""DeepSpeed's layouts: read as a `Snapshot`, and written from one."""

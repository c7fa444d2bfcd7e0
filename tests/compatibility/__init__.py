"""One script, two engines: what each row of DeepSpeed's API and config gives under either."""

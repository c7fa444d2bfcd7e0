"""Head to head: one model, one data stream, one ds_config, several engines (`harmony-ds bench`).

    comparison = Comparison(task, contestants)
    results = run(comparison, Path("bench.json"))     # every engine in a process of its own, repeats interleaved
    print(table(results)); write_page(results, Path("bench.html"))

An engine is one module in `engines/`; adding another touches nothing else.
"""

"""Head to head: one model, one data stream, one ds_config, several engines (`harmony-ds bench`).

    results = run(contestants, Rounds(), Path("bench.json"), resume=False, tell=print)   # a process per engine
    print(table(summarize(results), results.unit)); write_page(results, Path("bench.html"))

An engine is a row of `ENGINES` in a module of `engines/`; adding another touches nothing else.
"""

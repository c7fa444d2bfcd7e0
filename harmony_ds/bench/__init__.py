"""Head to head: one model, one data stream, one ds_config, several engines (`harmony-ds bench`).

    results = run(contestants, Rounds(), Path("bench.json"), resume=False, tell=print)   # a process per engine
    print(report(results)); draw(results, Path("bench.png"))

An engine is a row of `ENGINES` in a module of `engines/`, or in any other module (`--engines module:name`).
"""

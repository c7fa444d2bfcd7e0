"""Head to head: one model, one data stream, one ds_config, several engines (`harmony-ds bench`).

    results = Results.empty({"harmony": Row("harmony", workload)}, Rounds())
    run(results, Path("bench.json"), tell=print)  # a process for each engine
    print(report(results)); draw(results, Path("bench.png"))

An engine is a row of `ENGINES` in a module of `engines/`, or in any other module (`--engines module:name`).
"""

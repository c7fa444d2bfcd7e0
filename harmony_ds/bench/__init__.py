"""Compare engines on one model, with the same data and ds_config (`harmony-ds bench`).

    results = Results.empty({"harmony": Row("harmony", workload)}, Rounds())
    run(results, Path("bench.json"), tell=print)  # a process for each engine
    print(report(results)); draw(results, Path("bench.png"))

An engine is a row of `ENGINES` in a module of `engines/`, or in any other module (`--engines module:name`).
"""

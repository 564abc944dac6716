"""Auto-mapping: which devices and which layout each model of a dataflow gets.

It follows HybridFlow (arXiv 2409.19256, section 6) and is explained in docs/auto_mapping.md.

- `plan_types`: input and output of the search. `hardware`, `host_pools`: clusters as device pools.
- `constants`, `cost`, `generation_cost`: the cost model, a formula for each term of a step's
  seconds. Bytes come from `hjax.workers.memory`.
- `search_space`, `role_options`: every layout of one role. `search`, `allocate`: exact search.
- `strategies`: planning strategies by name, also of other systems. `result`: the result as data.
- `problems`: a problem from published model names. `auto`: a run's problem and plan (`hjax.plan`).
- `calibration`, `rates`, `profile`: measured constants. `profile_correction`: runs correct them.
"""

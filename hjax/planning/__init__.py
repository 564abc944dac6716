"""Auto-mapping: which devices and which layout each model of a dataflow gets.

HybridFlow (arXiv 2409.19256, section 6). Plain records in, candidates out. docs/auto_mapping.md
explains it.

- `records`: what the search is given and returns. `hardware`: the catalogue of devices.
- `constants`, `cost`, `generation`: seconds of one layout, a formula each; its bytes are those of
  `hjax.workers.memory`.
- `options`: every way to run one role. `search`, `allocate`: the best of them together, exactly.
- `strategies`: ways to plan by name, other systems among them. `result`: a search's answer as data.
- `problems`: an algorithm's calls as records, a problem out of names. `auto`: a run's own problem,
  and its plan (`hjax.plan`).
- `calibration`, `rates`, `profile`: constants measured on the devices at hand, and kept.
"""

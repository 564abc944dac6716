"""Auto-mapping: which devices and which layout each model of a dataflow gets.

HybridFlow (arXiv 2409.19256, section 6). Plain records in, a plan out: `records` holds them,
`hardware` the catalogue, `cost`, `generation` and `memory` the model, `options`, `search` and
`allocate` the search. docs/auto_mapping.md explains it.
"""

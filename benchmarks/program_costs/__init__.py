"""What compiled programs cost by data sheet: ``benchmarks/roofline.py`` shows it.

- `roofline`: seconds, bytes and products of a program's text. `limits`: a device's peaks, and the
  wires between devices. `loops`, `products`, `sources`: what a loop copies, what an instruction
  multiplies, which line it comes from.
- `lower_bound`: the least that a step's program has to do, by arithmetic alone.
- `account`: both as JSON, beside what ``hjax.launch.compile`` says. `tables`: for people.
"""

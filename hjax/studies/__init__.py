"""What the HybridFlow paper counted (arXiv 2409.19256), counted again; pages made from code.

The transition between training and generation (the paper's sections 5.3 and 5.4, its Table 2):

- `transition_groups`: who trains and who generates what, by three methods, and the closed formulas.
- `gather_and_cut`: the transition of the systems that the 3D-HybridEngine is compared with.
- `transition_cost`: one case by one method on devices, formula beside count; what
  `python -m hjax.launch.transition` shows.
- `transition_docs`: docs/transition.md, every case.

Auto-mapping (the paper's sections 6 and 8):

- `paper_experiments`: the paper's clusters, models and systems as problems for `hjax.planning`, and
  what it reports of them.
- `mesh_hops`: how far apart neighbours in a mesh stand on wires, the table of docs/meshes.md.
- `paper_tables`: the tables and counted sentences of docs/auto_mapping.md; its command writes both
  pages' tables.

And `config_docs`: docs/config.md, from the definitions of the keys; `algorithm_docs`: what pages of
docs/algorithms take from the source.

The head of each file that makes a page says by which command.
"""

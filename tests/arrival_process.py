"""One process of a receiving pool: ``python arrival_process.py FOLDER RANK PROCESSES PORT``.

Takes in the parameters of FOLDER/sent.pickle; what its devices hold then is in FOLDER/RANK.pickle.
"""

import dataclasses
import pathlib
import pickle
import sys

import numpy as np

DEVICES = 2  # per process
AXES = {
    "q": ("layers", "embed", "heads"),  # stacked over layers
    "table": ("vocab", "embed"),
    "norm": ("layers", "embed"),  # replicated in generation
    "pair": ("pair",),  # too small to be split over all devices
    "scale": (),  # too small to be split at all
}
# Small enough that q goes in slices of layers, and the rest in several buckets.
BUCKET_BYTES = 200


@dataclasses.dataclass(frozen=True)
class File:
    """A part in a file."""

    path: str
    dtype: np.dtype
    shape: tuple[int, ...]

    def fetch(self):
        return np.fromfile(self.path, self.dtype).reshape(self.shape)


def targets(devices):
    """Shardings of the receiving pool's generation: fsdp, over the processes, is free."""
    from hjax.sharding.layout import make_layouts

    layout = make_layouts(devices, {"fsdp": 2, "tensor": 2}, {"tensor": 2}).generate
    return {name: layout.sharding(*axes) for name, axes in AXES.items()}


def main(folder, rank, processes, port):
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank, initialization_timeout=15)
    from hjax.sharded_values import region_of
    from hjax.sharding.cross_mesh_transfer import IncomingParameters

    sent = pickle.loads((folder / "sent.pickle").read_bytes())
    arrival = IncomingParameters(
        targets(jax.devices()), sent["shapes"], sent["dtypes"], BUCKET_BYTES
    )
    params = arrival(sent["pieces"])
    fetched = arrival.fetched_bytes
    shards = {
        name: [(region_of(s.index, x.shape), np.asarray(s.data)) for s in x.addressable_shards]
        for name, x in params.items()
    }
    errors = {}
    for name in ("damaged", "short"):
        try:
            arrival(sent[name])
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    again = arrival(sent["pieces"])
    same = {name: bool((x == params[name]).all()) for name, x in again.items()}
    told = {"shards": shards, "fetched": fetched, "errors": errors, "same": same}
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(told))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))

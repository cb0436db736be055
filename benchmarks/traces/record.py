"""Record the committed traces: the routing of the example model, with and without the load-balancing loss.

    python benchmarks/traces/record.py

Eight ranks train data-parallel on the text of Python's standard library. Two processes stand for them: each takes
four micro-batches per step and accumulates their gradients, so the weights in a step are the same for all eight, as
they are on eight ranks. A trace of the micro-batches ``[4 n, layer, 2, expert]`` is then folded to
``[n, layer, 8, expert]``. Takes about fifteen minutes on two cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROCESSES, MICRO_BATCHES = 2, 4
TRACES = {"natural": 0.0, "auxiliary": 0.01}


def main() -> None:
    for name, auxiliary in TRACES.items():
        with tempfile.TemporaryDirectory() as folder:
            raw = Path(folder) / "raw.npz"
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                str(PROCESSES),
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                "127.0.0.1:0",
                "examples/train.py",
                "--steps",
                "300",
                "--batch",
                str(4 * PROCESSES),
                "--micro-batches",
                str(MICRO_BATCHES),
                "--experts",
                "32",
                "--layers",
                "4",
                "--top-k",
                "2",
                "--auxiliary-loss",
                str(auxiliary),
                "--generate",
                "0",
                "--policy",
                "static",
                "--record",
                str(raw),
                "--dump",
                folder,
            ]
            subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            trace = np.load(raw)
            counts = trace["counts"]
            steps, layers, ranks, experts = counts.shape
            counts = counts.reshape(steps // MICRO_BATCHES, MICRO_BATCHES, layers, ranks, experts)
            counts = counts.transpose(0, 2, 3, 1, 4).reshape(-1, layers, ranks * MICRO_BATCHES, experts)
            per_rank = experts // (ranks * MICRO_BATCHES)
            owners = np.tile(np.arange(experts, dtype=np.int32) // per_rank, (layers, 1))
            target = HERE / f"{name}.npz"
            np.savez_compressed(target, counts=counts.astype(np.uint16), layers=trace["layers"], owners=owners)
            print(f"{target.relative_to(ROOT)}: {counts.shape}, {target.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()

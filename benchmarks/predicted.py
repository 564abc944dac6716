"""What a program of a real model takes on accelerators, by their compilers' own text: no device.

    python benchmarks/predicted.py [--topology=v5e:2x4] [--model=qwen2.5-1.5b] [--tokens=2048]
                                   [--micro_batch=8] [--remat=attention]

An update of 64 rows (8 prompts of 512 tokens with 8 samples each; GRPO without KL, FSDP over all
devices, bfloat16, layers recomputed). Prints one JSON line: of each program of the step the
seconds by data sheet, its minimum, and what it sends; ``waited``, the share of the received bytes
that nothing runs beside.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

CONFIG = """
import hjax

def get_config():
    config = hjax.default_config()
    config.algorithm.name = "GRPO"
    config.algorithm.kl_coef = 0.0
    config.actor.path = {model!r}
    config.data.path = "prompts.jsonl"
    config.reward.function = "reward.py:reward"
    config.model.dtype = "bfloat16"
    config.model.remat = {remat!r}
    config.rollout.prompts, config.rollout.samples = 8, 8
    config.rollout.max_prompt_length = 512
    config.rollout.max_response_length = {tokens} - 512
    config.actor.micro_batch = {rows}
    config.layout.actor.train.data, config.layout.actor.train.fsdp = 1, -1
    return config
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--model", default="qwen2.5-1.5b")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--micro_batch", type=int, default=8, help="rows of a pass; 0: all")
    parser.add_argument("--remat", default="attention")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        given = {"model": options.model, "tokens": options.tokens, "rows": options.micro_batch}
        given["remat"] = options.remat
        content = CONFIG.format(**given)
        (place / "predicted.py").write_text(content)
        (place / "prompts.jsonl").write_text('{"prompt": "one"}\n')
        (place / "reward.py").write_text(
            "def reward(prompts, responses, **columns):\n    return [0.0] * len(responses)\n"
        )
        done = subprocess.run(
            [sys.executable, "-m", "hjax.launch.compile", f"--config={place}/predicted.py",
             f"--topology={options.topology}", "--json"],
            cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
    if done.returncode not in (0, 2) or not done.stdout:
        sys.exit(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    programs = {}
    for record in found["programs"]:
        name = f"{record['role']}.{record['program']}"
        if name.startswith("actor.transition"):
            continue
        if "refused_bytes" in record:
            programs[name] = {"refused_bytes": record["refused_bytes"]}
            continue
        account, least = record["roofline"], record["minimum"]
        programs[name] = {
            "seconds": round(account["seconds"], 4),
            "minimum_seconds": round(least["seconds"], 4),
            "bound": account["bound"],
            "mfu": round(record.get("mfu", 0.0), 4),
            "flops_over_minimum": round(account["flops"] / least["flops"], 3),
            "received_gb": round(account["received_bytes"] / 1e9, 2),
            "minimum_received_gb": round(least["received_bytes"] / 1e9, 2),
            "waited": round(account["synchronous_bytes"] / max(account["received_bytes"], 1), 3),
            "temporary_gib": round(record["temporary_bytes"] / 2**30, 2),
        }
    print(
        json.dumps(
            {
                "benchmark": "predicted",
                "model": options.model,
                "topology": options.topology,
                "tokens": options.tokens,
                "micro_batch": options.micro_batch,
                "remat": options.remat,
                "versions": found["versions"],
                "programs": programs,
            }
        )
    )


if __name__ == "__main__":
    main()

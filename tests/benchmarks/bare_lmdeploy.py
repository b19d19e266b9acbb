"""lmdeploy as its own users run it: no harness, no hooks, no Ray. ``python bare_lmdeploy.py CASE MODEL_PATH``."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline

    case = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    config = PytorchEngineConfig(
        dtype=case["dtype"],
        device_type="ascend",
        eager_mode=True,
        session_len=512,
        max_batch_size=16,
        block_size=case["batch"]["block_size"],
        num_gpu_blocks=64,
    )
    engine = pipeline(sys.argv[2], backend_config=config)
    generation = GenerationConfig(max_new_tokens=case["decoding"]["max_new_tokens"], do_sample=False, ignore_eos=True)
    # Words stand for the ids: the pipeline takes text, and the number of tokens is what costs time.
    prompts = ["a " * len(request["token_ids"]) for request in case["requests"]]
    answers = engine(prompts, gen_config=generation, do_preprocess=False)
    print(sum(len(answer.token_ids) for answer in answers), "tokens")
    engine.close()


if __name__ == "__main__":
    main()

"""vLLM as its own users run it: no harness, no hooks, no Ray. ``python bare_vllm.py CASE MODEL_PATH``."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    case = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    llm = LLM(
        model=sys.argv[2],
        skip_tokenizer_init=True,
        dtype=case["dtype"],
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=16,
        block_size=case["batch"]["block_size"],
        kv_cache_memory_bytes=64 << 20,
        additional_config={"enable_cpu_binding": False},
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=case["decoding"]["max_new_tokens"], ignore_eos=True, detokenize=False
    )
    prompts = [TokensPrompt(prompt_token_ids=request["token_ids"]) for request in case["requests"]]
    answers = llm.generate(prompts, sampling)
    print(sum(len(answer.outputs[0].token_ids) for answer in answers), "tokens")


if __name__ == "__main__":
    main()

"""vLLM with the vllm-ascend platform."""

"""lmdeploy's PyTorch engine with dlinfer."""

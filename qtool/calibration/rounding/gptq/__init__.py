"""GPTQ: the Hessian, the column loop, 2:4 pruning."""

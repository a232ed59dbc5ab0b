"""GPTQ: gptq.py is the method; hessian.py sums its input, rounding.py is what recipes name."""

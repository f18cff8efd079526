"""A stand-in for vLLM that needs no GPU: vLLM's scheduling and HTTP face over a calibrated step cost.

It knows what a server knows (flags, sizes, requests) and nothing of arms, workloads or cells.
"""

"""What kernl needs of the machine: its capabilities, the tuning cache and the CUDA-graph runner.

This room knows PyTorch and nothing else of kernl: no op, no graph, no pattern.
"""

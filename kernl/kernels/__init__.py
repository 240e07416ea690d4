"""Triton kernels and their launchers, one file a family of operations.

Nothing here knows ops, graphs or models: a launcher takes tensors that its op has validated and allocated. Each file
has `aot_cases(arch)`, the configurations its op chooses on a chip, so that all of them can be compiled and checked
without that chip.
"""

"""Tests that need a CUDA device; tests/conftest.py skips all of them without one."""

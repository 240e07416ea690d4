"""Benchmarks: peers side by side in one run, each row checks its result. Start with README.md in this folder."""

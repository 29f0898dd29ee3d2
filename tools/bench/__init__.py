"""The parts of tools/bench.py, which is the command."""

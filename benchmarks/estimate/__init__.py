"""How close estimates of peak memory come to what happens: `python -m benchmarks.estimate` writes the table.

grid       the cells: models x policies x shapes x precisions x processes, and a second grid drawn at random
truth      one cell really run, its second step measured; no code shared with the prediction in one process
parts      models that a config file alone does not describe
__main__   both for every cell, and docs/reference/accuracy.md
large      Llama-3 70B on 64 ranks and 405B on 1,024, estimated in a process of their own
gpu        the cells of one process on one CUDA device
"""

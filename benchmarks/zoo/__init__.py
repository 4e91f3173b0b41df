"""Every policy on every architecture: does the law hold, which blocks are found, who carries regions out.

``python -m benchmarks.zoo`` runs all of it and writes ``docs/reference/zoo.md``; ``tests/unit/test_zoo.py`` runs a
seeded slice.
"""

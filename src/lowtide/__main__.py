"""``python -m lowtide``, as ``torchrun ... -m lowtide`` needs it."""

from lowtide.cli import main

main()

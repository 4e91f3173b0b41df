"""What trainer and lab both need of the machine, and what they leave each other on its disk. No torch.

    files       files that are whole or absent, and files with one writer
    processes   who lives, who belongs to a launch, who dies with whom
    run_state   what became of a run: ``run.json`` read truthfully, and written

Below both, because neither imports the other: the lab starts the trainer as a child and reads what it wrote.
"""

"""What trainer and lab both need of the machine, and what they leave each other on its disk. No torch.

    files       files that are whole or absent, and files with one writer
    processes   who lives, who belongs to a launch, who dies with whom
    guarded     another program, as a process that dies with the one that started it
    cgroup      how often the kernel's out-of-memory killer struck
    run_state   what became of a run: ``run.json`` read truthfully, and written
    run_report  a run folder as a ``RunRecord``

Below both, because neither imports the other: the lab starts the trainer as a child and reads what it wrote.
"""

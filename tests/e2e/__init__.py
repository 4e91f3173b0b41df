"""The command as people run it: processes of its own, what it prints, what it leaves, how it ends."""

"""The parts of `compatibility.py`: environments, what is tested in them, and the table."""

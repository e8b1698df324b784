"""The diversity monitor's statistics, verdicts and alarms (see `monitor.py`)."""

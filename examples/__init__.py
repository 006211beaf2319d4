"""Scripts to copy from. ``digits.py`` is the one to start with."""

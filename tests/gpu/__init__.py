"""What only a GPU can show, in four minutes: ``make gpu``."""

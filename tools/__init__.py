"""Programs for those who work on Stageline; not part of the wheel."""

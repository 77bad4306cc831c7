"""foresight against every other policy, cell by cell."""

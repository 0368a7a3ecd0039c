"""`cspd compare`: configurations side by side, on the same seeds."""

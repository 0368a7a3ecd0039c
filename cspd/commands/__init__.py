"""The commands of `cspd`, one a file: `add` declares its options, `run` does it."""

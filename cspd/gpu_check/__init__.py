"""`cspd gpu-check`: is everything right on this device, how fast is it, and where does the time go."""

"""`cspd gpu-check`: is everything right on this device, how fast is it, and how near to what the device can do."""

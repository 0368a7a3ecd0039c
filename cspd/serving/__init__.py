"""`cspd serve`: a web page whose users share the engines."""

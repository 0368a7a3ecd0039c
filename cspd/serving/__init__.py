"""`cspd serve`: a web page and an HTTP API whose users share an engine."""

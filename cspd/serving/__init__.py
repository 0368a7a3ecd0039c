"""`cspd serve`: a page in the browser, whose visitors share the engines."""

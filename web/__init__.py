"""HTTP server, API keys, static files and the looks of all pages."""

"""HTTP server, static files and the looks of all pages."""

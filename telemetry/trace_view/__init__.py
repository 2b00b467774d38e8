"""What the spans of one request say: where its time went, as rows, as numbers and as a sentence. Pure."""

"""The pages of docs/reference/, one function each."""

"""What can go wrong with a journal."""


class JournalUnusable(Exception):
    """A file that cannot be this coordinator's journal: one line that names it. Nothing was changed."""


class JournalFailed(Exception):
    """A write that did not become durable: one line that names the file and the reason."""

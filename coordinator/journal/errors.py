"""What can go wrong with a journal."""


class JournalUnusable(Exception):
    """A file that cannot be this coordinator's journal. One line, which names the file; nothing was changed."""


class JournalFailed(Exception):
    """A write that did not become durable. Nothing can be promised from here on."""

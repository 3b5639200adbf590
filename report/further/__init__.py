"""The kinds of sentences that follow the first one in the head of a page, a module for each subject."""

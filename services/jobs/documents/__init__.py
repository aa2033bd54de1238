"""Documents, which become text of a prompt: PDFs and text files."""

"""Documents of requests: PDFs and text files, which become text of the prompt."""

"""Command line of the service: `python -m services.tokenizer`."""

from services.common.process import collector_paused

with collector_paused():
    from services.common.server import main
    from services.tokenizer.application import TokenizerApplication
    from services.tokenizer.settings import TokenizerSettings

main("tokenizer", TokenizerSettings, TokenizerApplication)

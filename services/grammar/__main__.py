"""Entry point of the grammar service: `python -m services.grammar`."""

from services.common.process import collector_paused

with collector_paused():
    from services.common.server import main
    from services.grammar.application import GrammarApplication
    from services.grammar.settings import GrammarSettings

main("grammar", GrammarSettings, GrammarApplication)

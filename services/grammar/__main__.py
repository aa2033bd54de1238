"""Entry point of the grammar service: `python -m services.grammar`."""

from services.common.server import main
from services.grammar.application import GrammarApplication, GrammarSettings

main("grammar", GrammarSettings, GrammarApplication)

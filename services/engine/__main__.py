"""python -m services.engine"""

from services.common.server import main
from services.engine.service import EngineApplication
from services.engine.settings import EngineSettings

if __name__ == "__main__":
    main("engine", EngineSettings, EngineApplication)

"""Loading and unloading of models, as requests without input ask for it."""

from services.http_shim.backends.model_source import ModelSource
from services.http_shim.backends.on_demand import OnDemandConnection, require_on_demand
from services.http_shim.http.access import authorized_model
from services.http_shim.http.exchange import Exchange

__all__ = ["load_model", "unload_model"]


async def load_model(
    exchange: Exchange, models: ModelSource, name: str, keep_alive: float | None
) -> None:
    """Return once a model is in memory. keep_alive: seconds that it stays; None = the default.

    Raises ServiceError.
    """
    served = await authorized_model(exchange, models, name)
    await models.require([name])
    if isinstance(served.connection, OnDemandConnection):
        await served.connection.load(keep_alive)


async def unload_model(exchange: Exchange, models: ModelSource, name: str) -> None:
    """Unload a model that no request uses. Raises ServiceError, also for one that always stays."""
    served = await authorized_model(exchange, models, name)
    await models.require([name])
    await require_on_demand(served, name, "keep_alive").unload(force=False)

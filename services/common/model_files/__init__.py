"""Files of models: checkpoints, their folders, the hub, and the catalog of a server."""

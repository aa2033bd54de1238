"""Language-model server and its client."""

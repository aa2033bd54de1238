"""What every service shares: settings, server bootstrap, errors, logging and telemetry."""

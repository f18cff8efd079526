"""What is measured: launchers, profiles, the embedded simulator, the tiny real model, the proxy."""

"""The ``mia-audit`` command: parse, call, print. No logic lives here."""

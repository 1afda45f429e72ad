"""The precision ledger: which layer runs in which precision in an engine, and why."""

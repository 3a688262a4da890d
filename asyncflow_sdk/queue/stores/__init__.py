"""Stores of payload: blocks of columns, the stores "local" and "hosts", and the storage unit of a host.

Nothing here knows the ledger, the journal or the server's calls.
"""

"""Calls to inference servers over HTTP: what the adapters of engines that run as servers have in common."""

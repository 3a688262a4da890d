"""``make bench-hosts``: columns that stay on their host, beside columns that go through the server, and a bare socket.

__main__   the table        network   hosts made of network namespaces        drive   what runs on a host
"""

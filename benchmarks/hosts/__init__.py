"""``make bench-hosts``: columns that stay on their host, beside columns that go through the server, bare sockets, and others.

__main__   the table        network   hosts made of network namespaces        drive   what runs on a host
ours       runs of ours     bare      sockets        peer_queue, peer_mooncake, peer_ray   others
"""

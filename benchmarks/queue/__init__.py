"""``make bench-queue``: the queue beside its peer and beside bare references, interleaved in one run.

__main__   rounds, medians, the table          drive      one contender through one workload, in real processes
contender  what a contender implements         workloads  what is done with one
ours, peer, floor   the contenders             ledger     the control plane alone, by live rows
samples    the data                            machine    what the machine allows
"""

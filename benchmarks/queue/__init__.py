"""``make bench-queue``: the queue beside its peer and beside bare references, interleaved in one run.

__main__   rounds, medians, the table          parts      the rows of the table
contender  what a contender implements         workloads  what is done with one
drive      one contender at one workload       ours, peer, floor   the contenders
ledger     the control plane alone             machine, samples    what the machine allows; the data
"""

"""``make bench-weights``: versions of the weights from a trainer's parameters into a replica's, beside what others use and
beside bare references, interleaved in one run.

__main__   rounds, medians, the table          parts      the rows of the table
contender  what a contender implements         model      the parameters, and how to tell that they arrived
drive      one contender, version by version   ours, gloo, files, rays, floor   the contenders
delta      a real model's updates, encoded
"""

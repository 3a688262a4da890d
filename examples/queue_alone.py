"""The TransferQueue by itself: a producer, two stages and a consumer, each where it likes to be.

python examples/queue_alone.py
"""

import threading

import numpy as np

import asyncflow_sdk as af


def score(address: str) -> None:
    """Another thread here; another process on this host is the same."""
    with af.connect(address, name="scorer") as run:
        while True:
            try:
                batch = run.queue.get("score", count=64)
            except af.Ended:
                return
            with batch:  # an exception in here gives the rows back
                batch.complete({"score": np.array([float(len(text)) for text in batch.texts("text")])})


def main() -> dict[str, float]:
    scores: dict[str, float] = {}
    with af.serve() as run:
        run.queue.declare("score", needs=["text"], gives=["score"])
        run.queue.declare("keep", needs=["text", "score"])
        scorer = threading.Thread(target=score, args=(run.address,))
        scorer.start()
        run.queue.put({"text": ["a", "bb", "ccc"]}, key="first")
        run.queue.put({"text": ["a", "bb", "ccc"]}, key="first")  # the same key: nothing is added twice
        run.queue.end()
        for batch in run.consumer("keep", count=64):
            scores |= dict(zip(batch.texts("text"), batch.array("score").tolist(), strict=True))
            batch.ack()
        scorer.join()
        print(scores, run.audit())
    return scores


if __name__ == "__main__":
    main()

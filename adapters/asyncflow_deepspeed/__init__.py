"""DeepSpeed as a train engine: ZeRO stages 0 to 3."""

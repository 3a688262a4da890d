"""CTranslate2 as a rollout engine of AsyncFlow SDK."""

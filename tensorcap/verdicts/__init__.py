"""What errors mean: pairs, statuses, the policy and everything it looks at."""

"""Many scenarios: which (`grid`), where their outcomes are kept (`store`), and who computes them (`executors`)."""

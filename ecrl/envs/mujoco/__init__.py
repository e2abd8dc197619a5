"""MuJoCo as a pure environment: physics as one operator, scenes from JSON, and worlds that tasks read and write."""

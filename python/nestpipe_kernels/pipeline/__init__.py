"""The stage graph as data, its validator, the schedules, the lane scheduler and NestedPipeline."""

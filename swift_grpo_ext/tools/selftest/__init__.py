"""`swift-grpo-ext selftest`: each promise, checked with the user's settings, model, rows, devices.

`command` starts a process for each topology that the devices allow. `worker` builds the real
trainer there, as `swift rlhf` does, and checks instead of training: `rig` generates with it,
`checks` compare, `outcome` says what a result is and tells rounding from other noise.
"""

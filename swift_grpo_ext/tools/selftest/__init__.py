"""`swift-grpo-ext selftest`: each promise, checked with the user's settings, model, rows, devices.

`command` starts a process for each topology that the devices allow, which builds the real trainer,
as `swift rlhf` does, and checks in place of training: `rig` generates with it, `checks` compare,
`outcome` defines a result and tells rounding from other noise.
"""

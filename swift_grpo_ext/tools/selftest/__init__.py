"""`swift-grpo-ext selftest`: check each promise with the user's settings, model, rows and devices.

`command` starts a process for each topology that the devices allow. The process builds the trainer
as `swift rlhf` does, and checks in place of training: `rig` generates and encodes, `checks` compare
results, `outcome` defines them.
"""

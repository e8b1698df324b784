"""Load the plugin: `--external_plugins` of `swift rlhf` and `swift rollout` names this file."""

import swift_grpo_ext

swift_grpo_ext.register()

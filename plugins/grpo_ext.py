"""What `--external_plugins` names, for `swift rlhf` and `swift rollout` alike."""

import swift_grpo_ext

swift_grpo_ext.register()

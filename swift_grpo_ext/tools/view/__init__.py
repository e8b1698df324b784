"""`swift-grpo-ext view`: a run's samples and curves in a browser, also while the run goes on."""

"""Images and labels as a network takes them: random for training, plain for scoring."""

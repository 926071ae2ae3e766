"""Train small language models whose attention is one integer apart (MHA, GQA, MQA) and watch every head."""

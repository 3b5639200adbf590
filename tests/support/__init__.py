"""What tests share: ranks as threads or processes, strategies, models, training loops."""

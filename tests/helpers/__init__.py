"""What tests share: a pool of worker processes, small models, the law's check, operator counts."""

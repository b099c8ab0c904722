"""What speed to expect from a model, a GPU and a workload; pure arithmetic."""

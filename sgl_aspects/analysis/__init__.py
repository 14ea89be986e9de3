"""What a run's spans answer: its numbers, and why a request took as long as it did."""

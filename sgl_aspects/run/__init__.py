"""What the processes of one run share: its folder, its collector, live control, reports of hooks."""

"""What a run says of itself: process logs, who waits for what, metric rows, the terminal, the report. Imports no torch."""

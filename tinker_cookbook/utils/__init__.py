"""Small helpers of the loops: logging of metrics, schedules, lazy imports."""

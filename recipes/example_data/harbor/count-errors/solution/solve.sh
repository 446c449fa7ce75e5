#!/bin/bash
set -e
cat /app/logs/*.log | awk '$2 == "ERROR"' | wc -l | tr -d ' ' > /app/errors.txt

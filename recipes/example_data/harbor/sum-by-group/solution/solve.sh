#!/bin/bash
set -e
cd /app
echo shop,total > totals.csv
tail -n +2 sales.csv | awk -F, '{sum[$1] += $3} END {for (s in sum) print s "," sum[s]}' | sort >> totals.csv

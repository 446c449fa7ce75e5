#!/bin/bash
set -e
tr 'A-Z' 'a-z' < /app/addresses.txt | sed 's/^[[:space:]]*//; s/[[:space:]]*$//' | grep . | LC_ALL=C sort -u > /app/unique.txt

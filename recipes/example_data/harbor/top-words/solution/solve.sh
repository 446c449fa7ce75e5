#!/bin/bash
set -e
cat > /app/top_words.py <<'END'
import collections
import re
import sys

text = open(sys.argv[1]).read().lower()
counts = collections.Counter(re.findall("[a-z]+", text))
for word, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: int(sys.argv[2])]:
    print(word, count)
END

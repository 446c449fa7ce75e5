#!/bin/bash
set -e
python3 - <<'END'
import re
path = "/app/events.txt"
text = open(path).read()
pattern = r"\b(\d{1,2})\.(\d{1,2})\.(\d{4})\b"
new = re.sub(pattern, lambda m: f"{m[3]}-{int(m[2]):02d}-{int(m[1]):02d}", text)
open(path, "w").write(new)
END

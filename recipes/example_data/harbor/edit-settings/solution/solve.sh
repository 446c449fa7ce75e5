#!/bin/bash
set -e
python3 - <<'END'
import json
path = "/app/settings.json"
settings = json.load(open(path))
settings["server"]["port"] = 8080
settings["features"].append("search")
del settings["debug"]
json.dump(settings, open(path, "w"), indent=2)
END

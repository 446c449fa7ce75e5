#!/bin/bash
set -e
find /app/photos -type f \( -name '*.jpeg' -o -name '*.JPG' \) | while read -r path; do
    mv "$path" "${path%.*}.jpg"
done

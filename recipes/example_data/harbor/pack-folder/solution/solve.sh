#!/bin/bash
set -e
cd /app
tar -czf project.tar.gz --exclude='*.tmp' --exclude=project/cache project

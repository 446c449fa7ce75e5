#!/bin/bash
set -e
find /app/tree -xtype l -delete

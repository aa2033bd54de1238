#!/usr/bin/env bash
# Completions over HTTP. BASE_URL is the URL that `make serve` prints.
set -euo pipefail
BASE_URL=${BASE_URL:-http://127.0.0.1:8000}

# one completion
curl --fail-with-body -sS "$BASE_URL/v1/completions" -H 'Content-Type: application/json' -d '{
  "prompt": "<|im_start|>user\nWrite a Python function that returns the sum of a list of numbers.<|im_end|>\n<|im_start|>assistant\n",
  "max_tokens": 64,
  "temperature": 0
}'
echo

# infill between a prompt and a suffix
curl --fail-with-body -sS "$BASE_URL/v1/completions" -H 'Content-Type: application/json' -d '{
  "prompt": "import json\n\n\ndef load(path):\n    with open(path) as file:\n        ",
  "suffix": "\n    return data\n",
  "max_tokens": 32,
  "temperature": 0
}'
echo

# a stream
curl --fail-with-body -sSN "$BASE_URL/v1/completions" -H 'Content-Type: application/json' -d '{
  "prompt": "import os\nimport sys\n",
  "max_tokens": 16,
  "stream": true
}'

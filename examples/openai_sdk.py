"""Completions with the openai SDK, which `.venv/bin/pip install openai` installs."""

import os

from openai import OpenAI

base_url = os.environ.get("BASE_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{base_url}/v1", api_key="none")

completion = client.completions.create(
    model="default", prompt="def read_json(path):\n", max_tokens=48, temperature=0
)
print(completion.choices[0].text)

for chunk in client.completions.create(
    model="default", prompt="def read_json(path):\n", max_tokens=48, temperature=0, stream=True
):
    for choice in chunk.choices:
        print(choice.text, end="", flush=True)
print()

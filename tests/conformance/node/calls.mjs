// Reads calls by name from stdin, makes them, and writes the answers by name to stdout.
import { text } from "node:stream/consumers";
import OpenAI from "openai";

const [, , baseURL, endpoint] = process.argv;
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const completions = endpoint === "chat" ? client.chat.completions : client.completions;

async function call(fields) {
  try {
    const answer = await completions.create(fields);
    if (!fields.stream) return answer;
    const chunks = [];
    for await (const chunk of answer) chunks.push(chunk);
    return { chunks };
  } catch (error) {
    return { error: { class: error.constructor.name, status: error.status, param: error.param } };
  }
}

const answers = {};
for (const [name, fields] of Object.entries(JSON.parse(await text(process.stdin)))) {
  answers[name] = await call(fields);
}
console.log(JSON.stringify(answers));

// Calls of Ollama's client for JavaScript: node ollama.mjs URL MODEL. Prints their answers as JSON.
import { Ollama } from "ollama";

const [host, model] = process.argv.slice(2);
const client = new Ollama({ host });
const options = { temperature: 0, num_predict: 80 };
const messages = [{ role: "user", content: "Hello!" }];
const question = { role: "user", content: "What is the weather in Rome?" };
const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [
  {
    type: "function",
    function: { name: "get_weather", description: "The weather of a city", parameters: city },
  },
];

const whole = await client.chat({ model, messages, options });
let streamed = "";
let last;
for await (const part of await client.chat({ model, messages, options, stream: true })) {
  streamed += part.message.content;
  last = part;
}
const asked = await client.chat({ model, messages: [question], tools, options });
const result = { role: "tool", content: "Sunny", tool_name: "get_weather" };
const history = [question, asked.message, result];
const told = await client.chat({ model, messages: history, tools, options });
const colour = { type: "object", properties: { colour: { enum: ["red", "green"] } }, required: ["colour"] };
const object = await client.chat({ model, messages, format: colour, options });
let refusal;
try {
  await client.show({ model: "no-such" });
} catch (error) {
  refusal = { message: error.message, status: error.status_code };
}
const aborted = await client.generate({ model, prompt: "def ", raw: true, stream: true });
for await (const part of aborted) {
  aborted.abort();
  break;
}

console.log(
  JSON.stringify({
    whole,
    streamed,
    last,
    calls: asked.message.tool_calls,
    told: told.message.content,
    object: object.message.content,
    generated: (await client.generate({ model, prompt: "Hello!", options })).response,
    listed: (await client.list()).models.map((each) => each.model),
    running: (await client.ps()).models.map((each) => each.model),
    shown: (await client.show({ model })).capabilities,
    refusal,
  }),
);

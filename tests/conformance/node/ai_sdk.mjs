// Makes calls of the AI SDK through a provider, and writes the answers by name to stdout.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const [, , baseURL, provider] = process.argv;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const model = {
  anthropic: () => createAnthropic({ baseURL, apiKey: "none" })("default"),
  chat: () => openai.chat("default"),
  responses: () => openai.responses("default"),
}[provider]();
const City = z.object({ city: z.enum(["Oslo", "Rome"]) });
const weather = tool({
  description: "The weather of a city",
  inputSchema: City,
  execute: async ({ city }) => `Sunny in ${city}`,
});
const asked = { model, prompt: "What is the weather in Rome?", maxOutputTokens: 60, maxRetries: 0 };
const calls = { tools: { weather }, toolChoice: "required" };

async function streamed(fields) {
  const result = streamText({ ...asked, ...fields, onError: () => {} });
  for await (const part of result.fullStream) if (part.type === "error") throw part.error;
  return result;
}

const text = await generateText(asked);
const stream = await streamed({});
const called = await generateText({ ...asked, ...calls });
const calledInStream = await streamed(calls);
const steps = await generateText({
  ...asked,
  ...calls,
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
  stopWhen: ({ steps }) => steps.length === 2,
});
const object = await generateObject({ ...asked, schema: City });
console.log(
  JSON.stringify({
    text: text.text,
    tokens: text.usage.outputTokens,
    streamed: await stream.text,
    streamedTokens: (await stream.usage).outputTokens,
    call: called.toolCalls[0].input,
    result: called.toolResults[0].output,
    streamedCall: (await calledInStream.toolCalls)[0].input,
    steps: steps.steps.length,
    object: object.object,
  }),
);

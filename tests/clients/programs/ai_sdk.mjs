// Checks of the AI SDK with its default provider, which speaks Responses: node ai_sdk.mjs URL FACTS.json
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, file] = process.argv.slice(2);
const { model: name, answer, text } = JSON.parse(readFileSync(file, "utf8"));
const openai = createOpenAI({ baseURL: `${url}v1`, apiKey: "unused" });
const model = openai(name);
let numCalls = 0;
const weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    numCalls += 1;
    return { city, sky: "clear" };
  },
});
const loop = { model, stopWhen: stepCountIs(4), maxRetries: 0 };

function checkLoop(steps) {
  assert.deepEqual(steps.map((step) => step.finishReason), ["tool-calls", "stop"]);
  assert.deepEqual(steps[0].toolCalls.map((call) => [call.toolName, call.input]), [["weather", { city: "Oslo" }]]);
  assert.equal(steps[0].text.trim(), text);
  assert.equal(steps[1].text.trim(), answer);
  assert.deepEqual(steps[0].toolResults.map((result) => result.output), [{ city: "Oslo", sky: "clear" }]);
}

async function twoTurns(tools) {
  const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
  const first = await generateText({ ...loop, messages, tools });
  checkLoop(first.steps);
  messages.push(...first.response.messages, { role: "user", content: "And now?" });
  const second = await generateText({ ...loop, messages, tools });
  checkLoop(second.steps);
  const sent = second.steps[0].request.body;
  const items = (typeof sent === "string" ? JSON.parse(sent) : sent).input;
  assert.ok(items.filter((item) => item.type === "item_reference").length >= 2, JSON.stringify(items));
  return second;
}

async function streamedTurns() {
  const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
  for (let turn = 0; turn < 2; turn += 1) {
    const stream = streamText({ ...loop, messages, tools: { weather }, onError: ({ error }) => { throw error; } });
    let written = "";
    for await (const part of stream.textStream) written += part;
    assert.ok(written.trim().startsWith(text) && written.trim().endsWith(answer), written);
    checkLoop(await stream.steps);
    messages.push(...(await stream.response).messages, { role: "user", content: "And now?" });
  }
}

async function toolsOfTheServerAreLeftOut() {
  const tools = { weather, search: openai.tools.webSearch({}) };
  const { steps } = await generateText({ ...loop, messages: [{ role: "user", content: "Search." }], tools });
  checkLoop(steps);
  assert.match(steps[0].response.headers["x-stageline-ignored"], /web_search/);
}

const whole = await twoTurns({ weather });
assert.ok(whole.totalUsage.inputTokens > 0 && whole.totalUsage.outputTokens > 0);
await streamedTurns();
await toolsOfTheServerAreLeftOut();
assert.equal(numCalls, 5);
console.log("two turns whole, two streamed, and one with a tool of the server");
